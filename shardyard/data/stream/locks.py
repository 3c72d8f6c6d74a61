"""Locks between processes that the kernel releases when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from shardyard.errors import UserError

_held: set[FileLock] = set()


class FileLock:
    """An exclusive flock on a file. Held by one process: children that it forks do not hold it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _held.add(self)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of it; in a forked child there is nothing to let go of."""
        if self in _held:
            _held.remove(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a child that is just being forked
            os.close(self._descriptor)


def try_lock(path: Path) -> FileLock | None:
    """The lock, made if it is not there; None while another process holds it.

    Raises:
        UserError: the file system knows no locks, or does not let the file be made.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _no_lock(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return FileLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise _no_lock(path, error) from error
        os.close(descriptor)  # its holder removed the file meanwhile: the lock is on nothing


def lock(path: Path, still_waiting: Callable[[float], None]) -> FileLock:
    """Wait for the lock; ``still_waiting`` is told the seconds of it, every so often."""
    began, pause = time.monotonic(), 0.005
    while (held := try_lock(path)) is None:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
        still_waiting(time.monotonic() - began)
    return held


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _no_lock(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot lock {path}: {error.strerror or error}; set model.cache_dir to a folder on a local disk of "
        f"this machine that can be written"
    )


def _leave_to_parent() -> None:
    """A forked child would keep its parent's locks held after the parent's death."""
    for held in _held:
        os.close(held._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
