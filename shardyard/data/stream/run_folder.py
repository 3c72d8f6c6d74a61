"""The folder of a run's windows on one node: owned while the run lives, removed when it is over."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from shardyard.data.stream.locks import FileLock, try_lock
from shardyard.errors import UserError

_OWNER = "owner.lock"
"""Locked by the run's leader on this node for as long as it lives."""

_ORPHANED = 24 * 3600.0
"""Seconds after which a folder without an owner is nobody's: a rank made it when its leader was gone."""


class RunFolder:
    """Held by the leader. Runs that died without removing theirs are cleaned up by the next one."""

    def __init__(self, root: Path, key: str, run_id: str) -> None:
        """Take ``root/key/run_id`` and remove what dead runs have left under ``root``.

        Raises:
            UserError: the folder cannot be made, or another run has it.
        """
        self.path = run_path(root, key, run_id)
        self._process = os.getpid()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make {self.path}: {error.strerror or error}; set model.cache_dir to a folder that "
                f"can be written"
            ) from error
        self._lock = self._own()
        _remove_dead(root)

    def _own(self) -> FileLock:
        # Locked before it has its name: nobody can take the owner for dead in between.
        new = self.path / f"{_OWNER}.{secrets.token_hex(4)}"
        held = try_lock(new)
        if held is None or (self.path / _OWNER).exists():
            raise UserError(f"{self.path} belongs to another run")
        new.rename(self.path / _OWNER)
        return held

    def remove(self) -> None:
        """Delete it; nothing happens in a forked child, or a second time."""
        if os.getpid() == self._process:
            _remove(self.path)
            self._lock.release()


def run_path(root: Path, key: str, run_id: str) -> Path:
    """Where the ranks of a run on this node keep their windows."""
    return root / key / run_id


def remove_ownerless(path: Path) -> None:
    """Delete the folder if its leader has left: what a rank that fails after its leader has made of it."""
    if not (path / _OWNER).exists():
        _remove(path)


def _remove_dead(root: Path) -> None:
    for folder in root.glob("*/*"):
        owner = folder / _OWNER
        with contextlib.suppress(FileNotFoundError):  # another run cleans up as well
            if owner.exists():
                held = try_lock(owner)
                if held is not None:
                    with held:
                        _remove(folder)
            elif time.time() - folder.stat().st_mtime > _ORPHANED:
                _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # the key's folder, if no other run uses it
