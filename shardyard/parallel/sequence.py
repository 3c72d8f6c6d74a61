"""Which tokens of a micro-batch a rank holds, and the padding that makes them divide.

A micro-batch is documents end to end, [1, T]. Context parallelism gives each of ``cp`` ranks a part of its
tokens:

- contiguous (``ulysses``): rank r holds the r-th of cp equal stretches;
- head-tail (``ring``, ``kvallgather``): each document is cut into 2 cp chunks and rank r holds chunks r and
  2 cp - 1 - r of each, in that order. A later query sees more keys; so every rank has the same work.

Padding is at the end of a document or a dummy document at the end of all, which causal attention per document
never shows to a real token. Tensor parallelism needs a number of tokens that it divides, and a pipeline the
same number in every micro-batch of a step; both are met by dummy documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

DUMMY_TOKENS = 512
"""A dummy document is at most this long: the work of attention grows with the square."""


@dataclass(frozen=True)
class ContextShare:
    """What attention has to know to work over several ranks; it reads this without importing it."""

    method: str
    """``ulysses``, ``ring`` or ``kvallgather``."""
    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence is shared by ``cp_size`` ranks, the tokens of each of which ``tp_size`` divides."""

    cp_size: int = 1
    cp_rank: int = 0
    cp_type: str = "ulysses"
    tp_size: int = 1
    cp_group: dist.ProcessGroup | None = None

    @property
    def head_tail(self) -> bool:
        """Whether each document is shared on its own, by chunks; else the sequence is, by stretches."""
        return self.cp_size > 1 and self.cp_type != "ulysses"

    @property
    def unit(self) -> int:
        """What divides the number of tokens on a rank."""
        return math.lcm(2, self.tp_size) if self.head_tail else self.tp_size

    def local_length(self, doc_lens: Sequence[int]) -> int:
        """Tokens on each rank, padding included, of a micro-batch of documents of these lengths."""
        return _multiple(math.ceil(sum(self._padded(doc_lens)) / self.cp_size), self.unit)

    def share(self, doc_lens: Sequence[int], local_tokens: int | None = None) -> SequenceShare:
        """This rank's share of a micro-batch, padded to exactly ``local_tokens`` on each rank if given.

        Raises:
            ValueError: ``local_tokens`` is less than the documents need, or ``unit`` does not divide it.
        """
        natural = self.local_length(doc_lens)
        local = natural if local_tokens is None else local_tokens
        if local < natural or local % self.unit:
            raise ValueError(
                f"{local} tokens on a rank: at least {natural} are needed, in multiples of {self.unit}"
            )
        padded = self._padded(doc_lens)
        dummies = self._dummies(local * self.cp_size - sum(padded))
        return SequenceShare(self, tuple(doc_lens), (*padded, *dummies), local)

    def _padded(self, doc_lens: Sequence[int]) -> list[int]:
        return (
            [_multiple(length, 2 * self.cp_size) for length in doc_lens] if self.head_tail else list(doc_lens)
        )

    def _dummies(self, tokens: int) -> list[int]:
        """Lengths of dummy documents of so many tokens in all."""
        step = 2 * self.cp_size if self.head_tail else 1
        longest = max(step, DUMMY_TOKENS // step * step)
        return [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)


@dataclass(frozen=True)
class SequenceShare:
    """One rank's part of one micro-batch of T tokens; ``local_tokens`` of them, padding included."""

    layout: SequenceLayout
    real_lens: tuple[int, ...] = field(repr=False)
    """The documents of the data."""
    doc_lens: tuple[int, ...]
    """The documents as attention sees them, of all the sequence's ranks: padded, and dummies after them."""
    local_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all tokens and nothing else."""
        return self.layout.cp_size == 1 and self.doc_lens == self.real_lens

    def cut(self, row: torch.Tensor, fill: int) -> torch.Tensor:
        """[1, T] -> [1, T_local]: this rank's tokens in the order it holds them, padding is ``fill``."""
        if self.is_whole:
            return row
        anchor, real = self._table.on(row.device)
        return torch.where(real, row[:, anchor], fill)

    def cut_positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, T_local]: the data's own; in padding a document's last, so that none is too large for
        a model, and 0 in a dummy.
        """
        if self.is_whole:
            return position_ids
        anchor, _ = self._table.on(position_ids.device)
        return torch.where(anchor < 0, 0, position_ids[:, anchor])

    def restore(self, parts: torch.Tensor) -> torch.Tensor:
        """[cp, 1, T_local, ...], each rank's tokens -> [1, T, ...], in the data's order, without padding."""
        everything = parts.transpose(0, 1).flatten(1, 2)
        return everything if self.is_whole else everything[:, self._table.place.to(parts.device)]

    @property
    def real(self) -> torch.Tensor:
        """bool [T_local], on the host: which tokens of this rank are data's."""
        return self._table.real

    def attention_kwargs(self) -> dict[str, Any]:
        """What travels through the model's forward to attention."""
        layout = self.layout
        if layout.cp_size == 1:
            return {"doc_lens": self.doc_lens}
        assert layout.cp_group is not None, "a sequence on several ranks needs their group"
        context = ContextShare(layout.cp_type, layout.cp_group, layout.cp_rank, layout.cp_size)
        return {"doc_lens": self.doc_lens, "context": context}

    @cached_property
    def _table(self) -> _Table:
        return _table(self.layout, self.real_lens, self.doc_lens)


@dataclass(frozen=True)
class _Table:
    """Where this rank's tokens come from, and where the data's are.

    ``anchor`` [T_local]: the token in the data, a document's last one for its padding, -1 in a dummy;
    ``real`` [T_local]: tokens of the data; ``place`` [T]: where each of those is in the ranks' parts laid end
    to end.
    """

    anchor: torch.Tensor
    real: torch.Tensor
    place: torch.Tensor

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.anchor.to(device), self.real.to(device)


def _table(layout: SequenceLayout, real_lens: tuple[int, ...], doc_lens: tuple[int, ...]) -> _Table:
    padded = np.array(doc_lens, np.int64)
    lengths = np.zeros_like(padded)
    lengths[: len(real_lens)] = real_lens
    within = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    length = np.repeat(lengths, padded)
    start = np.repeat(np.cumsum(lengths) - lengths, padded)
    real, dummy = within < length, length == 0
    anchor = np.where(dummy, -1, start + np.minimum(within, length - 1))
    # All tokens, rank by rank, each rank's in the order of the sequence.
    order = np.argsort(_holder(layout, padded, within), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    mine = order.reshape(layout.cp_size, -1)[layout.cp_rank]
    tables = (anchor[mine], real[mine], place[real])
    return _Table(*(torch.from_numpy(np.ascontiguousarray(table)) for table in tables))


def _holder(layout: SequenceLayout, padded: np.ndarray, within: np.ndarray) -> np.ndarray:
    """The rank that holds each token of the padded sequence."""
    if not layout.head_tail:
        return np.arange(len(within)) // (len(within) // layout.cp_size)
    chunk = within // np.repeat(padded // (2 * layout.cp_size), padded)
    return np.minimum(chunk, 2 * layout.cp_size - 1 - chunk)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
