"""A run folder has one run at a time: its process holds a lock that goes with it, however it ends.

A second run in the folder would take the first one's unfinished save for a leftover. The lock is a record
lock on a file of the run: it leaves no file of its own, survives no process, is not inherited by forked
workers, and works over NFS. Closing any descriptor of that file gives it up, so the process that holds it
opens the file no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

LOCKED = "resolved_config.yaml"
_WAIT_S, _POLL_S = 10.0, 0.25
_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length (0: all), pid."""


def refuse_if_in_use(output_dir: Path, *, wait_s: float = _WAIT_S) -> str:
    """Wait a moment for a run that is just ending there; "" then. One process calls it, which does not hold
    the lock.

    Raises:
        UserError: another process of this machine goes on in the folder. One of another machine is warned of:
            a machine that is gone may hold a lock for long.
    """
    deadline = time.monotonic() + wait_s
    while (holder := _holder(output_dir / LOCKED)) is not None:
        if holder > 0 and time.monotonic() >= deadline:
            raise UserError(
                f"training.output_dir: {output_dir} belongs to a run that is going on (process {holder}); "
                "wait for its end or stop it, or name another folder"
            )
        if holder <= 0:
            logger.warning(
                "training.output_dir: a process of another machine holds %s: if that run still goes on, stop "
                "one of the two, or they destroy each other's checkpoints", output_dir,
            )  # fmt: skip
            break
        time.sleep(_POLL_S)
    return ""


@contextmanager
def held(output_dir: Path, *, holds: bool = True) -> Iterator[None]:
    """Hold the folder of a run that has written its settings there; without ``holds`` do nothing."""
    descriptor = None
    if holds:
        with contextlib.suppress(OSError):  # a file system without locks; another one's is looked at before
            descriptor = os.open(output_dir / LOCKED, os.O_RDWR)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _holder(path: Path) -> int | None:
    """The process that holds ``path``; 0 or less for one that this machine does not show, None for nobody."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else pid
