"""The windows of a run on one node: each is tokenised once, by whoever needs it first.

A folder holds a file per window, and locks. There is no daemon and no collective: a rank that finds a window
absent takes its lock, looks again, and makes it. The kernel frees the lock of a rank that is killed, and the
next one takes over.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from shardyard.data.stream.locks import lock
from shardyard.data.stream.tokenise import WindowMaker
from shardyard.data.stream.window import Window, leftovers, write_window
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")

_KEPT_OPEN = 16
"""Windows that a process keeps mapped."""

_SAY_EVERY = 30.0
"""Seconds between two lines of a rank that waits."""

_END = "end"
"""The file that holds the number of windows of an epoch, once somebody has met the end."""


class WindowCache:
    """``get`` gives any window; can be sent to other processes, which then share the folder."""

    def __init__(self, folder: Path, maker: WindowMaker) -> None:
        self.folder = folder
        self.maker = maker
        self._open: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._end: int | None = None

    def get(self, epoch: int, window: int, *, workers: int = 1) -> Window | None:
        """A window of an epoch, made by ``workers`` processes if it is absent; None past the epoch's end.

        Raises:
            UserError: it cannot be made (a bad row, a full disk, ...).
        """
        key = (epoch, window)
        if key not in self._open:
            if self._is_past_end(window):
                return None
            found = self._load(key) or self._make(key, workers)
            if found is None:
                return None
            self._open[key] = found
            while len(self._open) > _KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    @property
    def windows_per_epoch(self) -> int | None:
        """The windows of an epoch: the same of each; None before anyone has met its end."""
        if self._end is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._end = int((self.folder / _END).read_text())
        return self._end

    def remove_before(self, epoch: int, window: int) -> None:
        """Delete the windows before this one. Whoever still needs one makes it again."""
        for path in self.folder.glob("e*-w*"):
            first, _, second = path.name.partition(".")[0].partition("-")
            if (int(first[1:]), int(second[1:])) < (epoch, window):
                path.unlink(missing_ok=True)

    def _is_past_end(self, window: int) -> bool:
        return self.windows_per_epoch is not None and window >= self.windows_per_epoch

    def _path(self, key: tuple[int, int]) -> Path:
        return self.folder / f"e{key[0]}-w{key[1]}.window"

    def _load(self, key: tuple[int, int]) -> Window | None:
        try:
            return Window(self._path(key))
        except (FileNotFoundError, NotADirectoryError, ValueError):  # absent, or damaged: it is made again
            return None

    def _make(self, key: tuple[int, int], workers: int) -> Window | None:
        path = self._path(key)
        with _file_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with lock(path.with_suffix(".lock"), _Waiting(key)):
            found = self._load(key)
            if found is not None or self._is_past_end(key[1]):
                return found
            for leftover in leftovers(path):  # the lock's holder is the only writer
                leftover.unlink(missing_ok=True)
            made = self.maker.make(*key, workers)
            with _file_errors(self.folder):
                if made is None:
                    self._mark_end(key[1])
                    return None
                write_window(path, made)
                if made.is_last:
                    self._mark_end(key[1] + 1)
                return Window(path)

    def _mark_end(self, windows: int) -> None:
        if self.windows_per_epoch not in (None, windows):
            raise UserError(
                f"data.dataset: an epoch had {self.windows_per_epoch} windows of rows and now has {windows}: "
                f"its files changed while the run reads them"
            )
        temporary = self.folder / f"{_END}.tmp-{os.getpid()}"
        temporary.write_text(str(windows))
        temporary.replace(self.folder / _END)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


class _Waiting:
    """Says every so often that this rank waits."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key
        self._said = 0.0

    def __call__(self, seconds: float) -> None:
        if seconds - self._said >= _SAY_EVERY:
            self._said = seconds
            logger.info(
                "data: waiting for window %d of epoch %d, which another process tokenises (%.0f s)",
                self._key[1], self._key[0], seconds,
            )  # fmt: skip


@contextlib.contextmanager
def _file_errors(folder: Path):
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the tokenised windows to {folder}: {error.strerror or error}; free space there, "
            f"or set model.cache_dir to a folder that can be written"
        ) from error
