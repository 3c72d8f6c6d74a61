"""How tensors of a Hugging Face model become the piece of one rank, and back. Pure functions of tensors.

A rule joins the *wholes* (one or more Hugging Face tensors) into one tensor and cuts that for ``count``
ranks; ``piece`` gives the part of rank ``index``, ``whole`` gives one of the wholes back from all pieces. It
only slices and copies, so values never change; on meta tensors it gives shapes. Source of the rules:
REFERENCE 6.2; megatron-core's ColumnParallelLinear, RowParallelLinear, SelfAttention and GroupedMLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """The two directions of one rule."""

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        """Part ``index`` of ``count``.

        Raises:
            ValueError: a shape does not fit.
        """
        ...

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        """Tensor ``which`` of the wholes, from all pieces in the order of their ranks.

        Raises:
            ValueError: a shape does not fit.
        """
        ...


@dataclass(frozen=True)
class Replicated:
    """Each rank has the whole tensor."""

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        return wholes[0]

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        return pieces[0]


@dataclass(frozen=True)
class Cut:
    """One dimension is cut into equal parts: rows (0) or columns (1)."""

    dim: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        return _part(wholes[0], self.dim, index, count)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        return _joined(pieces, self.dim)


@dataclass(frozen=True)
class Vocabulary:
    """Rows of a vocabulary, zeros behind the last one up to ``padded`` rows; padding is dropped again."""

    rows: int
    padded: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        (table,) = wholes
        if table.shape[0] != self.rows:
            raise ValueError(f"it has {table.shape[0]} rows, the vocabulary {self.rows}")
        share = self.padded // count
        start = min(index * share, self.rows)
        stop = min(start + share, self.rows)
        missing = share - (stop - start)
        kept = table[start:stop]
        return torch.cat([kept, table.new_zeros((missing, *table.shape[1:]))]) if missing else kept

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        table = _joined(pieces, 0)
        if table.shape[0] < self.rows:
            raise ValueError(f"its parts hold {table.shape[0]} rows, the vocabulary {self.rows}")
        return table[: self.rows]


@dataclass(frozen=True)
class Gated:
    """Gate and up projection [I, H] each: a rank has its rows of the gate above its rows of the up."""

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        return _joined([_part(whole, 0, index, count) for whole in wholes], 0)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        return _joined([_part(piece, 0, which, 2) for piece in pieces], 0)


@dataclass(frozen=True)
class Interleaved:
    """Query, key and value [rows, ...] joined by key-value group: its queries, its key, its value.

    Also of biases, which have no second dimension.
    """

    groups: int
    queries: int
    """Query heads of a group."""
    head_dim: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        rows = [width * self.groups for width in self._widths]
        for whole, expected in zip(wholes, rows, strict=True):
            if whole.shape[0] != expected:
                raise ValueError(f"it has {whole.shape[0]} rows, the heads make {expected}")
        by_group = [
            _part(whole, 0, index, count).reshape(-1, width, *whole.shape[1:])
            for whole, width in zip(wholes, self._widths, strict=True)
        ]
        return _joined(by_group, 1).flatten(0, 1)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        start, width = sum(self._widths[:which]), self._widths[which]
        per_group = sum(self._widths)
        if sum(piece.shape[0] for piece in pieces) != self.groups * per_group:
            raise ValueError(f"its parts are no {self.groups} groups of {per_group} rows")
        parts = [
            piece.reshape(-1, per_group, *piece.shape[1:]).narrow(1, start, width).flatten(0, 1)
            for piece in pieces
        ]
        return _joined(parts, 0)

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.queries * self.head_dim, self.head_dim, self.head_dim


@dataclass(frozen=True)
class Stacked:
    """Tensors above one another, whole on each rank; ``rows`` of each."""

    rows: tuple[int, ...]

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        for whole, expected in zip(wholes, self.rows, strict=True):
            if whole.shape[0] != expected:
                raise ValueError(f"it has {whole.shape[0]} rows instead of {expected}")
        return _joined(wholes, 0)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        if pieces[0].shape[0] != sum(self.rows):
            raise ValueError(f"it has {pieces[0].shape[0]} rows instead of {sum(self.rows)}")
        return pieces[0].narrow(0, sum(self.rows[:which]), self.rows[which])


@dataclass(frozen=True)
class HeadParts:
    """Of each head's rows, those of part ``part``; ``widths`` are the rows of all parts of a head.

    The whole comes from the pieces of all parts: those of the first part of all ranks, then of the next.
    """

    heads: int
    widths: tuple[int, ...]
    part: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        (whole,) = wholes
        if whole.shape[0] != self.heads * sum(self.widths):
            raise ValueError(f"it has {whole.shape[0]} rows, the heads make {self.heads * sum(self.widths)}")
        by_head = _part(whole.unflatten(0, (self.heads, -1)), 0, index, count)
        start = sum(self.widths[: self.part])
        return by_head.narrow(1, start, self.widths[self.part]).flatten(0, 1)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        ranks = len(pieces) // len(self.widths)
        by_rank = [
            _joined(
                [
                    pieces[part * ranks + rank].unflatten(0, (-1, width))
                    for part, width in enumerate(self.widths)
                ],
                1,
            ).flatten(0, 1)
            for rank in range(ranks)
        ]
        return _joined(by_rank, 0)


@dataclass(frozen=True)
class GroupedGated:
    """Gates and ups [I, H] of the local experts, in turn, as one [H, experts x 2 I / count].

    Each expert's rows of its gate above those of its up, transposed: [H, 2 I / count]; the experts one behind
    the other in memory, read as H rows.
    """

    experts: int
    hidden: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        gated = Gated()
        fused = (gated.piece(wholes[2 * e : 2 * e + 2], index, count).t() for e in range(self.experts))
        return _stacked(fused, self.experts).reshape(self.hidden, -1)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        expert, part = divmod(which, 2)
        own = [_of_expert(piece, self.experts, (self.hidden, -1), expert).t() for piece in pieces]
        return Gated().whole(own, part)


@dataclass(frozen=True)
class GroupedDown:
    """Down projections [H, I] of the local experts as one [experts x I / count, H], each transposed."""

    experts: int
    hidden: int

    def piece(self, wholes: Sequence[Tensor], index: int, count: int) -> Tensor:
        own = (_part(whole, 1, index, count).t() for whole in wholes)
        return _stacked(own, self.experts).reshape(-1, self.hidden)

    def whole(self, pieces: Sequence[Tensor], which: int) -> Tensor:
        own = [_of_expert(piece, self.experts, (-1, self.hidden), which).t() for piece in pieces]
        return _joined(own, 1)


def _stacked(tensors: Iterable[Tensor], count: int) -> Tensor:
    """What torch.stack gives, without a second copy of all of them."""
    found: Tensor | None = None
    for number, tensor in enumerate(tensors):
        if found is None:
            found = tensor.new_empty((count, *tensor.shape))
        if (tensor.shape, tensor.dtype) != (found.shape[1:], found.dtype):
            found_here = f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"expert {number} has another shape or dtype than the first: {found_here}")
        found[number] = tensor
    assert found is not None
    return found


def _of_expert(piece: Tensor, experts: int, shape: tuple[int, int], expert: int) -> Tensor:
    if piece.numel() % (experts * abs(shape[0] * shape[1])):
        raise ValueError(f"its shape {list(piece.shape)} is not that of {experts} experts")
    return piece.reshape(experts, *shape)[expert]


def _part(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    size, rest = divmod(tensor.shape[dim], count)
    if rest:
        raise ValueError(f"its dimension {dim} of {tensor.shape[dim]} is not divided by {count}")
    return tensor.narrow(dim, index * size, size)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:  # cat would make one of them, and values would change
        raise ValueError(f"its parts have several dtypes: {', '.join(sorted(str(d) for d in dtypes))}")
    shapes = {tuple(n for d, n in enumerate(tensor.shape) if d != dim) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"its parts do not fit: {', '.join(str(list(t.shape)) for t in tensors)}")
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].is_meta:  # torch works the shape out a hundred times slower
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        return tensors[0].new_empty(shape)
    return torch.cat(list(tensors), dim)
