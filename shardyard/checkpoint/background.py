"""One piece of work beside the training, in a thread, whose verdict every rank takes when it wants it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

State = Literal["idle", "running", "finished", "failed"]


class Background:
    """At most one save at a time. Python itself waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def start(self, path: Path, work: Callable[[], None]) -> None:
        """Begin to make ``path``; the one before has to be over, its verdict taken."""
        assert self._thread is None, "the save before this one is not over"
        self._path, self._error = path, None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {path.name}")
        self._thread.start()

    def poll(self) -> State:
        """How far it is on this rank; asks no other, and does not wait."""
        if self._thread is None:
            return "idle"
        if self._thread.is_alive():
            return "running"
        return "finished" if self._error is None else "failed"

    def settle(self) -> None:
        """Wait until nothing runs, and keep the verdict for `wait`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> Path | None:
        """Wait until nothing runs; what has been made since the last call, or None.

        Raises:
            UserError: it could not be made; every rank's message is the same.
            RuntimeError: a rank or its process has failed otherwise.
        """
        if self._thread is None:
            return None
        self._thread.join()
        path, error, self._thread, self._error = self._path, self._error, None, None
        if isinstance(error, UserError):
            raise UserError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"saving checkpoint {path} failed beside the training: {error}") from error
        return path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            logger.debug("%s failed", self._path, exc_info=True)
