"""What one rank finds out, and all ranks learn: through the store, so it may take as long as it needs."""

from __future__ import annotations

from collections.abc import Callable

from shardyard.device.process_group import ProcessGroup
from shardyard.errors import UserError


def agree(group: ProcessGroup, what: str, work: Callable[[], str]) -> str:
    """What global rank 0's ``work`` returns, on every rank; its UserError is everyone's."""
    return _share(group, what, work, leads=group.is_main)


def agree_on_node(group: ProcessGroup, what: str, work: Callable[[], str]) -> str:
    """The same with one rank of each machine at work."""
    return _share(group, f"{what}/node{group.node_rank}", work, leads=group.local_rank == 0)


def _share(group: ProcessGroup, key: str, work: Callable[[], str], *, leads: bool) -> str:
    if not leads:
        verdict, value = group.wait(key)[:1], group.wait(key)[1:]
        if verdict == "!":
            raise UserError(value)
        return value
    try:
        value = _told_of_disks(work)
    except UserError as error:
        group.publish(key, f"!{error}")
        raise
    group.publish(key, f"={value}")
    return value


def _told_of_disks(work: Callable[[], str]) -> str:
    """``work``; what a disk refuses it (full, read-only, gone) is the user's to mend."""
    try:
        return work()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror or error}") from error
