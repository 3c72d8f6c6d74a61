"""Which rank holds which tensors of a model: all ranks all of them, or each its pipeline stages'."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.hf_files import Facts


@dataclass(frozen=True)
class Holdings:
    """The tensors of all ranks together. Ranks of one kind hold the same names, sharded among them."""

    facts: dict[str, Facts]
    owner: dict[str, int]
    """The first rank that holds a tensor; it and its kind gather it."""
    kind: tuple[int, ...]
    """Of each rank: the first rank that holds the same names."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], peers: Peers, order: Iterable[str] = ()) -> Holdings:
        """Every rank calls it. Names come in ``order``, others after them as the ranks have them.

        Raises:
            RuntimeError: two ranks hold different tensors under one name.
        """
        mine: dict[str, Facts] = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        digests = peers.gather(hashlib.sha256(repr(list(mine.items())).encode()).hexdigest())
        kind = tuple(digests.index(digest) for digest in digests)
        # Names are exchanged only where ranks differ, and by one rank of each kind.
        shares = (
            [mine] if len(set(kind)) == 1 else peers.gather(mine if kind[peers.rank] == peers.rank else {})
        )
        facts: dict[str, Facts] = {}
        owner: dict[str, int] = {}
        for rank, share in enumerate(shares):
            for name, found in share.items():
                if facts.setdefault(name, found) != found:
                    raise RuntimeError(
                        f"{name} is {facts[name]} on rank {owner[name]}, {found} on rank {rank}"
                    )
                owner.setdefault(name, rank)
        places = {name: place for place, name in enumerate(order)}
        names = sorted(facts, key=lambda name: places.get(name, len(places)))
        return cls({name: facts[name] for name in names}, owner, kind)

    def takes_part(self, rank: int, name: str) -> bool:
        """Whether ``rank`` gathers ``name``: a tied weight that two stages hold is gathered by the first."""
        return self.kind[rank] == self.kind[self.owner[name]]
