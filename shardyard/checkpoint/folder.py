"""The folder that a run's checkpoints lie in: names, order, pointers, and what a killed save leaves behind.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shutil
import time
from pathlib import Path

from shardyard.checkpoint.manifest import ManifestError, fault_of, read_complete
from shardyard.durable import sync, write_durably

logger = logging.getLogger("shardyard.checkpoint")

LATEST, BEST = "latest", "best"
_NAME = re.compile(r"global_step_([0-9]+)")
_TEMPORARY = ".tmp-global_step_"
_REPLACED = ".replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def temporary_path(folder: Path, name: object) -> Path:
    """Where something is made that is not yet, or no longer, a checkpoint."""
    return folder / f"{_TEMPORARY}{name}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name tells; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and len(match[1]) < 20 else None


def named(folder: Path) -> list[Path]:
    """What is called a checkpoint, complete or not, by step."""
    found = folder.glob("global_step_*") if folder.is_dir() else ()
    steps = [(step, path.name, path) for path in found if (step := step_of(path)) is not None]
    return [path for _, _, path in sorted(steps)]


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in the order in which they were saved: by sequence, then by step."""
    return [path for _, path in _in_order(folder)]


def next_sequence(folder: Path) -> int:
    found = _in_order(folder)
    return 1 + found[-1][0] if found else 1


def _in_order(folder: Path) -> list[tuple[int, Path]]:
    """(sequence, path) of the complete ones. Each is looked at once: another process may be removing some."""
    found = []
    for path in named(folder):
        with contextlib.suppress(ManifestError):
            found.append((read_complete(path).sequence, step_of(path), path.name, path))
    return [(sequence, path) for sequence, _, _, path in sorted(found)]


def pointed(folder: Path, name: str) -> Path | None:
    """The complete checkpoint that the pointer ``latest`` or ``best`` names."""
    try:
        target = (folder / name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / target
    return path if _NAME.fullmatch(target) and fault_of(path) is None else None


def point(folder: Path, name: str, path: Path) -> None:
    """Make the pointer ``name`` name ``path``, at once or not at all."""
    pointer = write_pointer(folder, name, path)
    pointer.replace(folder / name)
    sync(folder)


def write_pointer(folder: Path, name: str, path: Path) -> Path:
    """A pointer under a temporary name: what can fail for want of space fails here."""
    pointer = temporary_path(folder, name)
    write_durably(pointer, path.name + "\n")
    return pointer


def publish(temporary: Path, path: Path, pointers: list[str]) -> None:
    """Give a finished folder its name, durably, and point to it. One of that name before goes."""
    folder = path.parent
    written = {name: write_pointer(folder, name, path) for name in pointers}
    replaced = temporary_path(folder, f"{path.name}{_REPLACED}")
    if path.is_dir() and not path.is_symlink() and exchange(temporary, path):
        temporary.rename(replaced)  # the same step again, after a resume from an earlier one
    else:
        if path.exists() or path.is_symlink():
            path.rename(replaced)
        temporary.rename(path)
    sync(folder)
    for name, pointer in written.items():
        pointer.replace(folder / name)
    sync(folder)
    remove(replaced)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one move, so that no name is free in between; whether that could be
    done (renameat2 of Linux; not on NFS).
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a checkpoint, out of its name first: a removal cut short leaves nothing that looks like one.

    Of a link the link alone goes.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        doomed = path
        if not path.name.startswith(_TEMPORARY):
            doomed = temporary_path(path.parent, f"{path.name}.removed")
            path.rename(doomed)
        shutil.rmtree(doomed)


def leftovers(folder: Path) -> list[Path]:
    """What a save or a removal that was cut short has left under temporary names."""
    return sorted(folder.glob(f"{_TEMPORARY}*")) if folder.is_dir() else []


def age_s(path: Path) -> float:
    """Seconds since anything in it was last written, by this machine's clock."""
    times = [found.lstat().st_mtime for found in (path, *path.rglob("*"))]
    return time.time() - max(times)


def clean(folder: Path) -> None:
    """Remove leftovers, and give back its name to a checkpoint that was about to be replaced by a new one.

    One process of a disk calls it, while nobody saves there. What cannot be removed is said.
    """
    for path in leftovers(folder):
        try:
            name = path.name.removeprefix(_TEMPORARY)
            home = folder / name.removesuffix(_REPLACED)
            if name.endswith(_REPLACED) and step_of(home) is not None and not home.exists():
                path.rename(home)
                logger.info("restored %s, whose replacement was not complete", home)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s, which a save has left behind: %s", path, error)
