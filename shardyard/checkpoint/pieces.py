"""Which part of each tensor lies on which rank.

A sharded tensor is cut into boxes. Where several ranks hold the same box (replicas, tensor-parallel ranks of
what only FSDP shards, a tied weight of two stages) the first of them answers for it, so that whoever puts the
tensor together reads one copy of each number, the same one each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.holdings import Holdings


class Box(NamedTuple):
    """A part of a tensor: where it begins and how far it goes, dimension by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both cover; None where that is nothing."""
        starts = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        ends = tuple(map(min, zip(self._ends(), other._ends(), strict=True)))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds ``outer``."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(s, s + length) for s, length in zip(starts, self.shape, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))


class Piece(NamedTuple):
    """The box of a tensor that ``rank`` answers for."""

    rank: int
    box: Box


Pieces = dict[str, tuple[Piece, ...]]
"""By the name of a tensor, what it is put together of."""


def box_of(tensor: torch.Tensor) -> Box:
    """The part of ``tensor`` that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shape, offset = (tuple(map(int, numbers)) for numbers in found)
    return Box(offset, shape)


def pieces_of(tensors: Mapping[str, torch.Tensor], holdings: Holdings, peers: Peers) -> Pieces:
    """What each tensor is put together of; every rank calls it with the tensors that it holds.

    Raises:
        RuntimeError: the parts of a tensor do not make the whole.
    """
    found: dict[str, dict[Box, int]] = {name: {} for name in holdings.facts}
    everyone = peers.gather({name: box_of(tensor) for name, tensor in tensors.items()})
    for rank, boxes in enumerate(everyone):
        for name, box in boxes.items():
            if box.count and holdings.takes_part(rank, name):
                found[name].setdefault(box, rank)
    for name, boxes in found.items():
        _check_whole(name, list(boxes), holdings.facts[name][0])
    return {name: tuple(Piece(r, box) for box, r in boxes.items()) for name, boxes in found.items()}


def _check_whole(name: str, boxes: list[Box], shape: tuple[int, ...]) -> None:
    """Shards are the fields of a grid: cuts of one dimension do not depend on those of another."""
    fields = 1
    for dim, length in enumerate(shape):
        cuts = sorted({(box.offset[dim], box.shape[dim]) for box in boxes})
        ends = [0, *(start + size for start, size in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or (ends[-1] != length):
            fields = -1
            break
        fields *= len(cuts)
    if 0 not in shape and len(boxes) != fields:
        raise RuntimeError(f"the shards of {name} {list(shape)} do not make the whole: {boxes}")
