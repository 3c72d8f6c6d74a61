"""``data.dataset`` -> entries: inline mappings, names of dataset_info.json, files, folders and globs."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardyard.data.sources.entry import (
    FORMATS,
    OPENAI_COLUMNS,
    OPENAI_TAGS,
    Columns,
    DatasetEntry,
    Tags,
    named,
    suggestion,
)
from shardyard.errors import UserError

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_LATER_SUFFIXES = (".arrow", ".csv")
_LATER_KEYS = ("cloud_file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "subset", "folder")
_KEYS = ("file_name", "formatting", "columns", "tags", "num_samples", "ranking", "split", "script_url")
_PREFERENCE_COLUMNS = ("chosen", "rejected", "kto_tag")
_GLOB = re.compile(r"[*?\[]")
_TEMPORARY = re.compile(r"^[._~]")
"""Hidden files and markers as ``_SUCCESS``; names like ``a.jsonl.tmp`` have no suffix that is read anyway."""
_ACCEPTED = "json, jsonl and parquet files (txt too for pretraining)"


def resolve_datasets(
    dataset: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None, dataset_dir: str
) -> list[DatasetEntry]:
    """The entries that ``data.dataset`` names, in its order; their files exist.

    ``dataset`` is an inline entry, or one or several (a list, or one text with commas) of: a name in
    ``dataset_dir``/dataset_info.json, the path of a file or folder, a glob. A file is looked for as given if
    absolute, then in ``dataset_dir``, then in the working directory.

    Raises:
        UserError: nothing given, an unknown name or key, a file that is missing, empty or of a type that is
            not read, a folder or glob with no such file or with several types.
    """
    items: list[Any]
    if isinstance(dataset, str):
        items = [part.strip() for part in dataset.split(",") if part.strip()]
    elif isinstance(dataset, Mapping):
        items = [dataset] if dataset else []
    else:
        items = list(dataset or [])
    if not items:
        raise UserError(
            "data.dataset: nothing to train on; name a dataset, a file, or {file_name: train.jsonl}"
        )
    folder = Path(dataset_dir).expanduser()
    return [_resolve(item, folder) for item in items]


def _resolve(item: Any, dataset_dir: Path) -> DatasetEntry:
    if isinstance(item, Mapping):
        name = str(item.get("file_name", "inline entry"))
        return _entry(item, name, "data.dataset", dataset_dir)
    if not isinstance(item, str):
        raise UserError(f"data.dataset: must name datasets or files, found {item!r}")
    registry = dataset_dir / "dataset_info.json"
    known = _read_registry(registry) if registry.is_file() else {}
    if item in known:
        return _entry(known[item], item, f"{registry}: {item}", dataset_dir)
    if _locate(item, dataset_dir) or _is_path(item):
        return _entry({"file_name": item}, item, "data.dataset", dataset_dir)
    if dataset_dir.name == "ONLINE" or str(dataset_dir).startswith("REMOTE:"):
        raise UserError(f"data.dataset_dir: {dataset_dir} (datasets of a hub) comes with the data release")
    hint = suggestion(item, known) if registry.is_file() else " (there is no such file)"
    raise UserError(f"data.dataset: {item!r} is neither a file nor a name in {registry}{hint}")


def _is_path(item: str) -> bool:
    """Whether a name that is not registered was meant as a path."""
    suffix = Path(item).suffix.lower()
    return "/" in item or bool(_GLOB.search(item)) or suffix in SUFFIXES + _LATER_SUFFIXES


def _read_registry(registry: Path) -> dict[str, Any]:
    try:
        entries = json.loads(registry.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{registry}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{registry}: cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise UserError(f"{registry}: must be an object that maps names to entries")
    return entries


def _entry(given: Any, name: str, where: str, dataset_dir: Path) -> DatasetEntry:
    """Check one entry's keys; ``where`` is where it stands, for messages."""
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: an entry must be a mapping, found {type(given).__name__}")
    _refuse_later(given, where)
    formatting = given.get("formatting") or "alpaca"
    if formatting not in FORMATS:
        raise UserError(f"{where}.formatting: {formatting!r} is not one of {', '.join(FORMATS)}")
    num_samples = given.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        raise UserError(f"{where}.num_samples: must be a whole number from 1 on, found {num_samples!r}")
    columns, tags = (OPENAI_COLUMNS, OPENAI_TAGS) if formatting == "openai" else (Columns(), Tags())
    named_columns = given.get("columns")
    return DatasetEntry(
        name=name,
        files=_files(given.get("file_name"), where, dataset_dir),
        formatting=formatting,
        columns=named(columns, named_columns, f"{where}.columns", ignored=_PREFERENCE_COLUMNS),
        tags=named(tags, given.get("tags"), f"{where}.tags"),
        num_samples=num_samples,
        named_columns=None if named_columns is None else tuple(sorted(named_columns)),
    )


def _refuse_later(given: Mapping[str, Any], where: str) -> None:
    for key in given:
        if key not in _KEYS + _LATER_KEYS:
            raise UserError(f"{where}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    if given.get("script_url"):
        raise UserError(f"{where}.script_url: dataset scripts run code and are not read; give file_name")
    if given.get("ranking"):
        raise UserError(f"{where}.ranking: preference pairs come with a later release")
    if not given.get("file_name"):
        sources = [key for key in _LATER_KEYS if given.get(key)]
        if sources:
            raise UserError(f"{where}.{sources[0]}: comes with the data release; give file_name for now")
        raise UserError(f"{where}: has no file_name, so there is nothing to read")
    if given.get("split") not in (None, "train"):
        raise UserError(f"{where}.split: {given['split']!r}: local files have the split 'train' only")


def _files(given: Any, where: str, dataset_dir: Path) -> tuple[Path, ...]:
    """The files behind file_name: one type, each once, in the order given; a folder's or glob's sorted."""
    names = given if isinstance(given, list | tuple) else [given]
    files: list[Path] = []
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}.file_name: must be a path or a list of paths, found {name!r}")
        found = _locate(name, dataset_dir)
        if not found:
            places = name if Path(name).is_absolute() else f"{name} in {dataset_dir} or {Path.cwd()}"
            kind = f"glob matches none of the {_ACCEPTED}" if _GLOB.search(name) else "no such file or folder"
            raise UserError(f"{where}.file_name: {kind}: {places}")
        files += [file for file in found if file not in files]
    _check_types(files, where)
    for file in files:
        if file.stat().st_size == 0:
            raise UserError(f"{where}.file_name: {file} is empty (0 bytes); wanted {_ACCEPTED}")
    return tuple(files)


def _locate(name: str, dataset_dir: Path) -> list[Path]:
    """What ``name`` stands for in the first place that has it; a folder without data files is an error."""
    path = Path(name).expanduser()
    for candidate in [path] if path.is_absolute() else [dataset_dir / path, path]:
        if candidate.is_file():
            return [candidate]
        if candidate.is_dir():
            found = _data_files(candidate.iterdir())
            if not found:
                raise UserError(f"data.dataset: the folder {candidate} holds none of the {_ACCEPTED}")
            return found
        if _GLOB.search(name):
            found = _data_files(map(Path, glob.glob(str(candidate), recursive=True)))
            if found:
                return found
    return []


def _data_files(paths: Any) -> list[Path]:
    """The data files among ``paths``, sorted by name; hidden and temporary ones are left out."""
    wanted = SUFFIXES + _LATER_SUFFIXES
    kept = [p for p in paths if p.suffix.lower() in wanted and not _TEMPORARY.search(p.name) and p.is_file()]
    return sorted(kept, key=str)


def _check_types(files: Sequence[Path], where: str) -> None:
    types = sorted({file.suffix.lower() for file in files})
    for later in _LATER_SUFFIXES:
        if later in types:
            raise UserError(
                f"{where}.file_name: {later[1:]} comes with the data release; read are {_ACCEPTED}"
            )
    strange = [file for file in files if file.suffix.lower() not in SUFFIXES]
    if strange:
        raise UserError(f"{where}.file_name: {strange[0]} has no type that is read; read are {_ACCEPTED}")
    if len(types) > 1:
        examples = ", ".join(str(next(f for f in files if f.suffix.lower() == suffix)) for suffix in types)
        raise UserError(f"{where}.file_name: the files must be of one type, found {examples}")
