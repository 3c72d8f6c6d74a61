"""Which ranks see the same folder: all of them where it is shared, else those of a node."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.folder import temporary_path
from shardyard.checkpoint.manifest import MANIFEST, facts_of, fault_of
from shardyard.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Disks:
    """``leader`` is, for each rank, the first rank that sees the same files."""

    peers: Peers
    leader: tuple[int, ...]

    @property
    def leads(self) -> bool:
        """Whether this rank works for its disk."""
        return self.leader[self.peers.rank] == self.peers.rank

    @property
    def mates(self) -> list[int]:
        """The ranks that see what this rank sees, itself among them."""
        return self.ranks_of(self.leader[self.peers.rank])

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.leader))

    @property
    def are_one(self) -> bool:
        return len(self.leaders) == 1

    def ranks_of(self, leader: int) -> list[int]:
        return [rank for rank, found in enumerate(self.leader) if found == leader]

    def each(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` once for each disk and return all results, by leader; raises as `Peers.agree` does."""
        results: list[Any] = self.peers.agree(what, work if self.leads else _nothing)
        return [results[rank] for rank in self.leaders]


def find_disks(folder: Path, peers: Peers) -> Disks:
    """Write a file and see who sees it; ``folder`` is made where it is not. Every rank calls it.

    Raises:
        UserError: a rank cannot write there.
    """
    what = f"writing to {folder}"
    mine = temporary_path(folder, f"probe-{peers.rank}-{secrets.token_hex(8)}")

    def write(writes: bool) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if writes:
            mine.touch()
        return mine

    try:
        names = [path.name for path in peers.agree(what, lambda: write(peers.is_first))]
        if all(peers.gather((folder / names[0]).exists())):
            return Disks(peers, (0,) * peers.size)
        peers.agree(what, lambda: write(True))
        first_seen = next(rank for rank, name in enumerate(names) if (folder / name).exists())
        return Disks(peers, tuple(peers.gather(first_seen)))
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)


def readers_of(path: Path, peers: Peers) -> Disks:
    """Who sees the same copy of the checkpoint ``path``; nothing is written. Every rank calls it.

    Raises:
        UserError: a rank sees no manifest there.
    """

    def identity() -> tuple[int, int, str]:
        if not (path / MANIFEST).is_file():
            raise UserError(f"{path} {fault_of(path)}")
        found = (path / MANIFEST).stat()
        return found.st_ino, found.st_mtime_ns, facts_of(path / MANIFEST).sha256

    seen = peers.agree(str(path), identity)
    return Disks(peers, tuple(map(seen.index, seen)))


def _nothing() -> Any:
    return None
