"""Finished work that a killed run leaves for the next one: a folder of segments, each complete or absent.

    key.json        what the work depends on; work of another key is thrown away
    000000.blocks   arrays of several outcomes one after another, each in numpy's own format
    000000.json     written last: the size and checksum of the blocks, where the input goes on, the counts

Bytes of the result do not depend on where segments end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardyard.data.key import differences
from shardyard.data.preprocess.batches import Position
from shardyard.data.preprocess.outcome import Outcome, Tally
from shardyard.durable import flush, sync
from shardyard.errors import UserError

SAVE_EVERY = 30.0
"""Seconds of work in a segment, and so the most that a killed run loses, unless the caller says otherwise."""

_CHUNK = 1 << 20


class Busy(UserError):
    """Another process works there."""


class Spool:
    """The segments in ``folder``, appended to by ``add`` and read back by ``replay``.

    Opening it takes the folder over from a run that was killed: ``position``, ``tally`` and ``input_bytes``
    are then those of its last whole segment, and ``taken_over`` says in words what became of what was there.

    Raises:
        UserError: another process works in the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Any], *, save_every: float = SAVE_EVERY) -> None:
        self.folder = folder
        self.position = Position()
        self.tally = Tally()
        self.input_bytes = 0
        self.taken_over = ""
        self._save_every = save_every
        self._blocks: BinaryIO | None = None
        self._segments = 0
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _lock(folder)
            self._take_over(json.loads(json.dumps(parts, default=str)))

    def add(self, outcome: Outcome, end: Position, input_bytes: int) -> None:
        """Append an outcome, after which the input goes on at ``end``."""
        with file_errors(self.folder):
            if self._blocks is None:
                self._blocks = self._path("tmp").open("wb")
                self._began = time.monotonic()
            for name in sorted(outcome.arrays):
                np.save(self._blocks, outcome.arrays[name], allow_pickle=False)
            self._names = sorted(outcome.arrays)
        self.tally.add(outcome)
        self.input_bytes += input_bytes
        self.position = end
        if time.monotonic() - self._began >= self._save_every:
            self.commit()

    def commit(self) -> None:
        """Make what was added durable as a segment."""
        if self._blocks is None:
            return
        with file_errors(self.folder):
            size = self._blocks.tell()
            flush(self._blocks)
            self._blocks.close()
            self._blocks = None
            self._path("tmp").replace(self._path("blocks"))
            told = {
                "size": size, "crc32": _crc32(self._path("blocks")), "names": self._names,
                "position": self.position, "input_bytes": self.input_bytes, "tally": self.tally.to_json(),
            }  # fmt: skip
            write_json(self._path("json"), told)
        self._segments += 1

    def replay(self) -> Iterator[dict[str, np.ndarray]]:
        """The arrays of every outcome, in the order in which they were added; ``commit`` comes before."""
        for number in range(self._segments):
            names = json.loads(self._path("json", number).read_text(encoding="utf-8"))["names"]
            with self._path("blocks", number).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                while file.tell() < size:
                    yield {name: np.load(file, allow_pickle=False) for name in names}

    def close(self) -> None:
        """Leave the folder to another run. What was added since the last ``commit`` is lost."""
        if self._blocks is not None:
            with contextlib.suppress(OSError):  # a full disk, once more: what it holds is lost in any case
                self._blocks.close()
            self._blocks = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete the folder of a closed spool; its work is in the result now."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, suffix: str, number: int | None = None) -> Path:
        return self.folder / f"{self._segments if number is None else number:06d}.{suffix}"

    def _take_over(self, parts: dict[str, Any]) -> None:
        key = self.folder / "key.json"
        before = _read_json(key)
        if before == parts:
            while self._is_whole():
                self._segments += 1
        if self._segments:
            last = _read_json(self._path("json", self._segments - 1)) or {}
            self.position, self.input_bytes = Position(*last["position"]), last["input_bytes"]
            self.tally = Tally.from_json(last["tally"])
            self.taken_over = f"going on behind the {self.tally.rows} rows that a run before this one did"
        elif before not in (None, parts):
            changes = "; ".join(differences(before or {}, parts))
            self.taken_over = f"the unfinished work in {self.folder} is thrown away: {changes}"
        for path in self.folder.iterdir():
            number = path.stem
            if path.suffix == ".tmp" or (number.isdigit() and int(number) >= self._segments):
                path.unlink()
        write_json(key, parts)

    def _is_whole(self) -> bool:
        told, blocks = _read_json(self._path("json")), self._path("blocks")
        if told is None or not blocks.is_file() or blocks.stat().st_size != told.get("size"):
            return False
        return _crc32(blocks) == told.get("crc32")


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """OSErrors of writing at ``path`` as one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free space there, or name an output prefix "
            "in a folder that can be written"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is complete or absent, also after a power cut."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "surrogateescape"))
            flush(file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not flock: forked processes would hold it on for a while after this one was killed.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # systems differ in which they raise
        os.close(descriptor)
        raise Busy(f"{folder}: another preprocess is writing there; wait for it, or end it") from None
    return descriptor
