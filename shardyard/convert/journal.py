"""A folder under construction: whose it is, and which of its files are finished.

A conversion that is killed goes on when it is asked for again. The journal in the folder says which job the
folder belongs to and which files are done; it goes when the last file, by which readers know a complete
folder, is in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shardyard.convert.weights import Weights
from shardyard.durable import flush, remove_leftovers, sync
from shardyard.errors import UserError

JOURNAL = ".conversion.jsonl"


def job_of(weights: Weights, target: Path, form: str, **options: Any) -> dict[str, str]:
    """What makes two conversions the same: source, its files as they are now, the tensors, the options.

    ``target`` may lie within the source, and does not belong to it.
    """
    tensors = [[name, list(shape), str(dtype)] for name, (shape, dtype) in weights.facts.items()]
    files = [
        [str(path.relative_to(weights.folder)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(weights.folder.rglob("*"))
        if path.is_file() and not path.is_relative_to(target)
    ]
    digest = hashlib.sha256(json.dumps([tensors, files, dict(weights.config)]).encode()).hexdigest()
    return {
        "from": str(weights.folder.resolve()),
        "to": form,
        **{k: str(v) for k, v in options.items()},
        "source": digest,
    }


class Journal:
    """Use as a context manager around the writing into ``folder``; call `complete` last.

    ``finished`` holds what was recorded for each file that is done, and still there in its size.

    Raises:
        UserError: the folder holds other files or another conversion, another process works in it, or it
            cannot be written.
    """

    def __init__(self, folder: Path, job: Mapping[str, str]) -> None:
        self.folder = folder
        self.path = folder / JOURNAL
        self.finished: dict[str, dict[str, Any]] = {}
        self._job = dict(job)
        self._made_folder = False

    def __enter__(self) -> Journal:
        try:
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() and (foreign := next(self.folder.iterdir(), None)):
                raise UserError(
                    f"{self.folder} is not empty ({foreign.name}); name a new folder, nothing is overwritten"
                )
            self._file = self.path.open("a+", encoding="utf-8")
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self.folder} is a file; name a new folder") from None
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._take_up()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.finished:
            self.path.unlink(missing_ok=True)  # nothing is done, so nothing is left
            if self._made_folder:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
        self._file.close()
        if isinstance(error, OSError):
            free = f"{_free(self.folder):,.0f} MiB are free there"
            kept = "; finished files are kept, the same command goes on from there" if self.finished else ""
            raise UserError(
                f"{self.folder} cannot be written: {error.strerror or error} ({free}{kept})"
            ) from error

    def record(self, name: str, **facts: Any) -> None:
        """Note durably that the file ``name`` is done."""
        facts = {"bytes": (self.folder / name).stat().st_size, **facts}
        self._append({"file": name, **facts})
        self.finished[name] = facts

    def complete(self) -> None:
        """The folder is whole: the journal goes."""
        sync(self.folder)
        self.path.unlink()
        sync(self.folder)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is converting into {self.folder}; wait for its end") from None

    def _take_up(self) -> None:
        self._file.seek(0)
        rows = _rows(self._file.read())
        if not rows:
            self._file.truncate(0)
            self._append(self._job)
            sync(self.folder)
            return
        if rows[0] != self._job:
            keys = [key for key in {**rows[0], **self._job} if rows[0].get(key) != self._job.get(key)]
            was, now = ({k: v for k, v in row.items() if k in keys} for row in (rows[0], self._job))
            what = (
                "the source has changed since"
                if keys == ["source"]
                else f"it was {_said(was)}, now {_said(now)}"
            )
            raise UserError(
                f"{self.folder} holds an unfinished conversion of another kind: {what}. Remove that folder "
                "or name a new one"
            )
        for row in rows[1:]:
            name = str(row.pop("file"))
            path = self.folder / name
            if path.is_file() and path.stat().st_size == row["bytes"]:
                self.finished[name] = row

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        flush(self._file)

    def clear_leftovers(self, name: str) -> None:
        """Remove what a killed process has left of the file ``name``."""
        remove_leftovers(self.folder / name)


def _rows(text: str) -> list[dict[str, Any]]:
    """The lines; a last one that a kill cut short does not count."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _said(job: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in job.items() if key != "source") or "of other files"


def _free(folder: Path) -> float:
    """MiB."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize / 2**20
