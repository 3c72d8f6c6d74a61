"""Which checkpoints a limit keeps: the newest complete ones, and beside them the best one."""

from __future__ import annotations

import logging
from pathlib import Path

from shardyard.checkpoint.folder import BEST, complete, pointed, remove

logger = logging.getLogger("shardyard.checkpoint")


def expired(folder: Path, limit: int) -> list[Path]:
    """Complete checkpoints that a limit of ``limit`` >= 1 no longer keeps, oldest first.

    The newest is always kept. The best one is kept beside the limit; what a kept link points to is kept too.
    """
    whole = complete(folder)
    if not whole:
        return []
    newest, best = whole[-1], pointed(folder, BEST)
    others = [path for path in whole if path not in (newest, best)]
    kept = limit - (newest != best)
    going = others[: max(len(others) - kept, 0)]
    linked = {path.resolve() for path in whole if path not in going}
    return [path for path in going if path.is_symlink() or path.resolve() not in linked]


def retain(folder: Path, limit: int) -> None:
    """Remove what the limit no longer keeps. A failure costs space and nothing else, so it only warns."""
    for path in expired(folder, limit):
        logger.info("Removing old checkpoint: %s", path)
        try:
            remove(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s", path, error)
