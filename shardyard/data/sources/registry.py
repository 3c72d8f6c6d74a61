"""``data.dataset`` -> entries: mappings, names of dataset_info.json, files, folders, globs, ids of a hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.data.sources import cloud, hub
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
from shardyard.data.sources.locate import checked, is_path, local_files, locate
from shardyard.errors import UserError

Item = str | Mapping[str, Any]

REGISTRY = "dataset_info.json"
_ONLINE = "ONLINE"
_REMOTE = "REMOTE:"
_SOURCES = ("file_name", "script_url", "cloud_file_name", *hub.HUBS)
"""Keys that say where an entry's rows are; the first that an entry has is taken."""
_HUB_KEYS = ("subset", "split", "folder")
_KEYS = (*_SOURCES, *_HUB_KEYS, "formatting", "columns", "tags", "num_samples", "ranking")
_IGNORED_COLUMNS = ("kto_tag",)


@dataclass(frozen=True)
class _Places:
    """Where names are looked up. ``registry`` says, for messages, where the ``known`` entries are written."""

    known: Mapping[str, Any]
    registry: str
    folder: Path
    remote: str | None
    online: bool
    tokens: Mapping[str, str | None]
    cache_dir: str | None


def resolve_datasets(
    dataset: Item | Sequence[Item] | None,
    dataset_dir: str,
    *,
    tokens: Mapping[str, str | None] | None = None,
    cache_dir: str | None = None,
) -> list[DatasetEntry]:
    """The entries that ``data.dataset`` names, in its order; their files exist, downloaded if need be.

    ``dataset`` is one or several (a list, or one text with commas) of: an inline entry, a name in
    ``dataset_dir``/dataset_info.json, the path of a file or folder, a glob. A file is looked for as given if
    absolute, then in ``dataset_dir``, then in the working directory. ``dataset_dir: ONLINE`` makes every name
    an id on the Hugging Face hub; ``REMOTE:<repo>`` takes dataset_info.json, and the files that it names,
    from that data set repository there.

    ``tokens`` of the hubs by the keys hf, ms and om; ``cache_dir`` is where downloads are kept (None: each
    client's own folder).

    Raises:
        UserError: nothing given, an unknown name or key, a file that is missing, empty or of a type that is
            not read, a folder or glob with no such file or with several types, a download that fails.
    """
    items = _items(dataset)
    if not items:
        raise UserError(
            "data.dataset: nothing to train on; name a dataset, a file, or {file_name: train.jsonl}"
        )
    places = _places(dataset_dir, tokens or {}, cache_dir)
    return [_resolve(item, places) for item in items]


def check_datasets(dataset: Item | Sequence[Item] | None, dataset_dir: str) -> None:
    """Check entries as `resolve_datasets` does, as far as this machine shows them: no file has to
    be there, and nothing is downloaded.

    Raises:
        UserError: as `resolve_datasets` does.
    """
    is_local = dataset_dir != _ONLINE and not dataset_dir.startswith(_REMOTE)
    registry = Path(dataset_dir).expanduser() / REGISTRY
    known = _read_registry(registry, str(registry)) if is_local and registry.is_file() else {}
    for item in _items(dataset):
        if isinstance(item, Mapping):
            _checked(item, "data.dataset")
        elif item in known:
            _checked(known[item], f"{registry}: {item}")


def _items(dataset: Item | Sequence[Item] | None) -> list[Any]:
    if isinstance(dataset, str):
        return [part.strip() for part in dataset.split(",") if part.strip()]
    if isinstance(dataset, Mapping):
        return [dataset] if dataset else []
    return list(dataset or [])


def _places(dataset_dir: str, tokens: Mapping[str, str | None], cache_dir: str | None) -> _Places:
    folder = Path(dataset_dir).expanduser()
    registry, remote = folder / REGISTRY, None
    online = dataset_dir == _ONLINE
    label = str(registry)
    if dataset_dir.startswith(_REMOTE):
        remote = dataset_dir.removeprefix(_REMOTE)
        access = hub.Access(tokens.get("hf"), cache_dir)
        registry = hub.fetch_file("hf_hub_url", remote, REGISTRY, access, where="data.dataset_dir")
        label, folder = f"{remote}/{REGISTRY}", Path()
    known = _read_registry(registry, label) if not online and registry.is_file() else {}
    return _Places(known, label, Path() if online else folder, remote, online, tokens, cache_dir)


def _resolve(item: Any, places: _Places) -> DatasetEntry:
    if isinstance(item, Mapping):
        name = next((str(item[key]) for key in _SOURCES if item.get(key)), "inline entry")
        return _entry(item, name, "data.dataset", places)
    if not isinstance(item, str):
        raise UserError(f"data.dataset: must name datasets or files, found {item!r}")
    if places.online:
        return _entry({"hf_hub_url": item}, item, "data.dataset", places)
    if item in places.known:
        return _entry(places.known[item], item, f"{places.registry}: {item}", places, registered=True)
    if locate(item, places.folder) or is_path(item):
        return _entry({"file_name": item}, item, "data.dataset", places)
    hint = suggestion(item, places.known) if places.known else " (there is no such file)"
    raise UserError(f"data.dataset: {item!r} is neither a file nor a name in {places.registry}{hint}")


def _read_registry(registry: Path, label: str) -> dict[str, Any]:
    try:
        entries = json.loads(registry.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{label}:{error.lineno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{label}: nested too deeply") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{label}: cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise UserError(f"{label}: must be an object that maps names to entries")
    return entries


def _entry(given: Any, name: str, where: str, places: _Places, *, registered: bool = False) -> DatasetEntry:
    """Check one entry and find its files; ``where`` is where it stands, for messages."""
    source, entry = _checked(given, where)
    return replace(entry, name=name, files=_files(given, source, where, places, registered))


def _checked(given: Any, where: str) -> tuple[str, DatasetEntry]:
    """The key that says where an entry's rows are, and the entry without name and files."""
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: an entry must be a mapping, found {type(given).__name__}")
    source = _source(given, where)
    formatting = given.get("formatting") or "alpaca"
    if formatting not in FORMATS:
        raise UserError(f"{where}.formatting: {formatting!r} is not one of {', '.join(FORMATS)}")
    num_samples = given.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        raise UserError(f"{where}.num_samples: must be a whole number from 1 on, found {num_samples!r}")
    ranking = given.get("ranking") or False
    if not isinstance(ranking, bool):
        raise UserError(f"{where}.ranking: must be true or false, found {ranking!r}")
    columns, tags = (OPENAI_COLUMNS, OPENAI_TAGS) if formatting == "openai" else (Columns(), Tags())
    named_columns = given.get("columns")
    columns = named(columns, named_columns, f"{where}.columns", ignored=_IGNORED_COLUMNS)
    tags = named(tags, given.get("tags"), f"{where}.tags")
    if ranking:
        columns = _with_pair(columns, named_columns or {}, where)
    return source, DatasetEntry(
        name="",
        files=(),
        formatting=formatting,
        columns=columns,
        tags=tags,
        num_samples=num_samples,
        named_columns=None if named_columns is None else tuple(sorted(named_columns)),
        ranking=ranking,
    )


def _source(given: Mapping[str, Any], where: str) -> str:
    """The key that says where the rows are; checked with the keys that go with it."""
    for key in given:
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    source = next((key for key in _SOURCES if given.get(key)), None)
    if source is None:
        raise UserError(f"{where}: has no file_name, so there is nothing to read")
    if source == "script_url":
        raise UserError(f"{where}.script_url: dataset scripts run code and are not read; give file_name")
    for key in _HUB_KEYS:
        value = given.get(key)
        if value is not None and not (isinstance(value, str) and value):
            raise UserError(f"{where}.{key}: must be a name, found {value!r}")
    if source not in hub.HUBS:
        if given.get("split") not in (None, "train"):
            raise UserError(f"{where}.split: {given['split']!r}: {source} has the split 'train' only")
        idle = [key for key in ("subset", "folder") if given.get(key)]
        if idle and not any(given.get(key) for key in hub.HUBS):
            raise UserError(f"{where}.{idle[0]}: is for data sets of a hub, not for {source}; remove it")
    return source


def _with_pair(columns: Columns, listed: Mapping[str, Any], where: str) -> Columns:
    """Preference pairs need both replies: a column that is not listed has the name of its key."""
    pair = {key: listed.get(key, key) for key in ("chosen", "rejected")}
    for key, name in pair.items():
        if name is None:
            raise UserError(f"{where}.columns.{key}: null, but ranking: true needs this column; name it")
    return Columns(**(vars(columns) | pair))


def _files(
    given: Mapping[str, Any], source: str, where: str, places: _Places, registered: bool
) -> tuple[Path, ...]:
    value, at = given[source], f"{where}.{source}"
    if source == "file_name" and not (registered and places.remote):
        return local_files(value, where, places.folder)
    if source in hub.HUBS:
        if not isinstance(value, str):
            raise UserError(f"{at}: must be the name of one repository, found {value!r}")
        access = hub.Access(places.tokens.get(hub.HUBS[source].token), places.cache_dir)
        wanted = hub.Wanted(given.get("subset"), given.get("split") or "train", given.get("folder"))
        return checked(hub.fetch(source, value, wanted, access, where=at), at)
    names = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{at}: must be a name or a list of names, found {value!r}")
    if source == "cloud_file_name":
        return checked([file for name in names for file in cloud.fetch(name, places.cache_dir, at)], at)
    access, repo = hub.Access(places.tokens.get("hf"), places.cache_dir), places.remote or ""
    return checked([hub.fetch_file("hf_hub_url", repo, name, access, where=at) for name in names], at)
