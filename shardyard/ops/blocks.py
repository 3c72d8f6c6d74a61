"""Attention as a list of blocks whose partial results are merged.

Whoever spreads a sequence says which queries meet which keys; this computes it, forward and backward, in
pieces that need not be neighbours and may come one after another. Shapes as in ``flash``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardyard.ops import flash

Tensor = torch.Tensor


class Block(NamedTuple):
    """Queries and keys, as places in what this rank holds, and how far back a query sees (see ``flash``)."""

    queries: slice
    keys: slice
    reach: int | None


def stretch(first: int, last: int, *, query_at: int, key_at: int, window: int | None) -> list[Block]:
    """Causal attention of the queries [first, last) of a document.

    Query ``first`` is at ``query_at`` and the document's first key at ``key_at``. With ``window`` a query
    sees at most so many keys, its own included.
    """
    queries = slice(query_at, query_at + last - first)
    if window is not None and window < last:
        return [Block(queries, slice(key_at + max(0, first + 1 - window), key_at + last), window)]
    own = Block(queries, slice(key_at + first, key_at + last), flash.CAUSAL)
    return [Block(queries, slice(key_at, key_at + first), None), own] if first else [own]


def documents(doc_lens: Sequence[int], window: int | None) -> list[Block]:
    """Documents end to end, each with all its queries and keys here."""
    blocks, start = [], 0
    for length in doc_lens:
        if length:
            blocks += stretch(0, length, query_at=start, key_at=start, window=window)
        start += length
    return blocks


class Merging:
    """Output and log-sum-exp of some queries over the keys met so far (the online softmax)."""

    def __init__(self, q: Tensor, value_width: int, scale: float):
        dtype = flash.accumulator(q.dtype)
        self.q, self.scale = q, scale
        self.out = q.new_zeros((*q.shape[:3], value_width), dtype=dtype)
        self.lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)

    def meet(self, k: Tensor, v: Tensor, blocks: Iterable[Block]) -> None:
        for queries, keys, reach in blocks:
            out, lse = flash.forward(self.q[:, :, queries], k[:, :, keys], v[:, :, keys], reach, self.scale)
            before = self.lse[:, :, queries]
            merged = torch.logaddexp(before, lse)
            weights = (before - merged).exp().unsqueeze(-1), (lse - merged).exp().unsqueeze(-1)
            self.out[:, :, queries] = self.out[:, :, queries] * weights[0] + out * weights[1]
            self.lse[:, :, queries] = merged

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in the queries' type, and log-sum-exp.

        ``sinks`` [H] are scores of a key per head that every query sees and whose value is 0 (gpt-oss).
        """
        if sinks is not None:
            merged = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[None, :, None])
            self.out *= (self.lse - merged).exp().unsqueeze(-1)
            self.lse = merged
        return self.out.to(self.q.dtype), self.lse


class Gradients:
    """The way back: shares of the gradients of q, k and v, block by block."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float):
        self.grad, self.q, self.out, self.lse, self.scale = grad, q, out, lse, scale
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def meet(self, k: Tensor, v: Tensor, blocks: Iterable[Block], dk: Tensor, dv: Tensor) -> None:
        """Add to ``dk`` and ``dv``, and to ``self.dq``, what comes from these blocks."""
        for queries, keys, reach in blocks:
            rows = (slice(None), slice(None), queries)
            columns = (slice(None), slice(None), keys)
            grads = flash.backward(
                self.grad[rows], self.q[rows], k[columns], v[columns], self.out[rows], self.lse[rows],
                reach, self.scale,
            )  # fmt: skip
            for total, where, share in zip((self.dq, dk, dv), (rows, columns, columns), grads, strict=True):
                total[where] += share

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """[H]. A sink's value is 0: its score's gradient is p (0 - sum_j p_j dp_j), summed over queries."""
        probability = (sinks.to(self.lse.dtype)[None, :, None] - self.lse).exp()
        mean = (self.grad * self.out).to(self.lse.dtype).sum(-1)
        return -(probability * mean).sum(dim=(0, 2)).to(sinks.dtype)
