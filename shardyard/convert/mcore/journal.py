"""Which files of a conversion are finished: a small file beside them, written durably after each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardyard.durable import sync, temporary_name, write_durably
from shardyard.errors import UserError

NAME = ".conversion.json"


class Journal:
    """The finished files of one conversion, by their name within the folder, with their sizes."""

    def __init__(self, folder: Path, job: str, files: dict[str, int], complete: bool) -> None:
        self.folder = folder
        self.complete = complete
        """The folder holds all of this conversion already."""
        self.kept = tuple(files)
        """What was finished before this run."""
        self._job = job
        self._files = files

    @classmethod
    def open(cls, folder: Path, job: str, *, finished: str, work: str) -> Journal:
        """Start or go on. ``finished`` is the file that a complete folder has, ``work`` what any has.

        Raises:
            UserError: the folder holds another conversion, or something else, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            recorded = _read(folder / NAME)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}") from error
        if recorded is None:
            if (folder / finished).exists() or (folder / work).exists():
                raise UserError(f"{folder} holds a checkpoint already; name another folder, or remove it")
            journal = cls(folder, job, {}, False)
            journal._save()
            return journal
        if recorded["job"] != job:
            state = "a checkpoint" if (folder / finished).exists() else "unfinished work"
            raise UserError(
                f"{folder} holds {state} of another conversion (other source or layout); name another "
                "folder, or remove it"
            )
        whole = {name: size for name, size in recorded["files"].items() if _size(folder / name) == size}
        if len(whole) == len(recorded["files"]) and (folder / finished).exists():
            return cls(folder, job, whole, True)
        (folder / finished).unlink(missing_ok=True)  # a file has gone: not complete until it is back
        return cls(folder, job, whole, False)

    def has(self, name: str) -> bool:
        return name in self._files

    def add(self, files: dict[str, int]) -> None:
        """Record files that have their final names.

        Raises:
            UserError: the journal cannot be written.
        """
        self._files |= files
        self._save()

    def _save(self) -> None:
        path = self.folder / NAME
        temporary = temporary_name(path)
        try:
            write_durably(temporary, json.dumps({"job": self._job, "files": self._files}, indent=1))
            temporary.replace(path)
            sync(self.folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"{path} is not written: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        recorded = None
    if (
        not isinstance(recorded, dict)
        or not isinstance(recorded.get("job"), str)
        or not isinstance(recorded.get("files"), dict)
        or not all(Path(name).parts[0] not in ("..", "/") for name in recorded["files"])
    ):
        raise UserError(f"{path} is no journal of a conversion; name another folder, or remove it")
    return recorded


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
