"""A file of JSON lines that is complete or not there."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from shardyard.durable import flush, remove_leftovers, sync, temporary_name
from shardyard.errors import UserError


class JsonlOutput:
    """Lines go into a file of a temporary name beside ``path``, which takes its name at the end."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        self._overwrite = overwrite
        self._file: IO[str] | None = None
        self._temporary: Path | None = None
        self._lines = 0

    @property
    def is_begun(self) -> bool:
        return self._file is not None

    def check(self) -> None:
        """Raise UserError if the file could not be made."""
        if self.path.is_dir() or self.path.name in ("", ".", ".."):
            raise UserError(f"--output {self.path}: that is a folder; name a file")
        if self.path.exists() and not self._overwrite:
            raise UserError(f"--output {self.path}: it is there already; name another, or --overwrite it")
        if not self.path.parent.is_dir():
            raise UserError(f"--output {self.path}: there is no folder {self.path.parent}")

    def write(self, line: str) -> None:
        try:
            if self._file is None:
                remove_leftovers(self.path)
                self._temporary = temporary_name(self.path)
                self._file = self._temporary.open("w", encoding="utf-8")
            self._file.write(line + "\n")
        except OSError as error:
            raise UserError(f"--output {self.path}: {error.strerror or error}") from error
        self._lines += 1

    def finish(self) -> int:
        """Give the file its name; how many lines it has."""
        assert self._file is not None and self._temporary is not None
        try:
            flush(self._file)
            self._file.close()
            self._temporary.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            raise UserError(f"--output {self.path}: {error.strerror or error}") from error
        self._file = None
        return self._lines

    def abandon(self) -> None:
        """Remove what is not finished."""
        if self._file is not None and self._temporary is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._file, self._lines = None, 0
