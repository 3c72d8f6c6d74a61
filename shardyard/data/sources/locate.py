"""``file_name`` -> local files: a path, a folder or a glob, in one order on every machine."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardyard.data.sources.files import ACCEPTED, file_type
from shardyard.errors import UserError

_GLOB = re.compile(r"[*?\[]")
_TEMPORARY = re.compile(r"^[._~]")
"""Hidden files and markers as ``_SUCCESS``; names like ``a.jsonl.tmp`` have no type that is read anyway."""

_BESIDE_ARROW = ("state.json", "dataset_info.json")
"""What the package ``datasets`` saves beside its arrow files, without a row in them."""


def local_files(given: Any, where: str, dataset_dir: Path) -> tuple[Path, ...]:
    """The files behind file_name: one type, each once, in the order given; a folder's or glob's sorted.

    ``where`` is where the entry stands, for messages.

    Raises:
        UserError: nothing is found, an empty file, a type that is not read, or several types.
    """
    names = given if isinstance(given, list | tuple) else [given]
    files: list[Path] = []
    for name in names:
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}.file_name: must be a path or a list of paths, found {name!r}")
        found = locate(name, dataset_dir)
        if not found:
            places = name if Path(name).is_absolute() else f"{name} in {dataset_dir} or {Path.cwd()}"
            kind = f"glob matches none of the {ACCEPTED}" if _GLOB.search(name) else "no such file or folder"
            raise UserError(f"{where}.file_name: {kind}: {places}")
        files += [file for file in found if file not in files]
    return checked(files, f"{where}.file_name")


def locate(name: str, dataset_dir: Path) -> list[Path]:
    """What ``name`` stands for in the first place that has it; a folder without data files is an error."""
    path = Path(name).expanduser()
    for candidate in [path] if path.is_absolute() else [dataset_dir / path, path]:
        if candidate.is_file():
            return [candidate]
        if candidate.is_dir():
            return _files_of_folder(candidate)
        if _GLOB.search(name):
            found = data_files(map(Path, glob.glob(str(candidate), recursive=True)))
            if found:
                return found
    return []


def is_path(item: str) -> bool:
    """Whether a name that is not registered was meant as a path."""
    return "/" in item or bool(_GLOB.search(item)) or bool(file_type(Path(item)))


def data_files(paths: Iterable[Path]) -> list[Path]:
    """The data files among ``paths``, sorted by name; hidden and temporary ones are left out."""
    kept = [p for p in paths if file_type(p) and not _TEMPORARY.search(p.name) and p.is_file()]
    saved = {p.parent for p in kept if file_type(p) == ".arrow"}
    kept = [p for p in kept if not (p.parent in saved and p.name in _BESIDE_ARROW)]
    return sorted(kept, key=str)


def checked(files: Sequence[Path], where: str) -> tuple[Path, ...]:
    """The files, if they can be one entry.

    Raises:
        UserError: a type that is not read, several types, or a file of 0 bytes.
    """
    strange = [file for file in files if not file_type(file)]
    if strange:
        raise UserError(f"{where}: {strange[0]} has no type that is read; read are {ACCEPTED}")
    types = sorted({file_type(file) for file in files})
    if len(types) > 1:
        examples = ", ".join(str(next(f for f in files if file_type(f) == kind)) for kind in types)
        raise UserError(f"{where}: the files must be of one type, found {examples}")
    for file in files:
        if file.stat().st_size == 0:
            raise UserError(f"{where}: {file} is empty (0 bytes); wanted {ACCEPTED}")
    return tuple(files)


def _files_of_folder(folder: Path) -> list[Path]:
    found = data_files(folder.iterdir())
    if found:
        return found
    holding = sorted(
        sub.name
        for sub in folder.iterdir()
        if sub.is_dir() and not _TEMPORARY.search(sub.name) and data_files(sub.iterdir())
    )
    hint = f"; those in its sub-folders are not read: name one ({', '.join(holding[:5])})" if holding else ""
    raise UserError(f"data.dataset: the folder {folder} holds none of the {ACCEPTED}{hint}")
