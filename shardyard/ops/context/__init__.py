"""Attention over a sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard.ops.context.kvallgather import kvallgather_attention
from shardyard.ops.context.ring import ring_attention
from shardyard.ops.context.share import ContextShare
from shardyard.ops.context.ulysses import ulysses_attention
from shardyard.ops.documents import Kernel

__all__ = ["ContextShare", "context_attention"]

Tensor = torch.Tensor


def context_attention(
    context: ContextShare,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_lens: Sequence[int],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """q [1, H, T/cp, D], k and v [1, Hkv, T/cp, D] -> [1, H, T/cp, D of v], for this rank's tokens.

    ``doc_lens`` are the documents of the whole sequence, padded as ``context.method`` needs. ``kernel`` is
    for ulysses; the other methods merge blocks, for which ``flash`` has the kernel. All ranks of the
    group must call this together, forward and backward.

    Raises:
        NotImplementedError: dropout with another method than ulysses, or a sliding window with ring.
    """
    shared: dict[str, Any] = dict(doc_lens=doc_lens, scale=scale, sinks=sinks)
    if context.method == "ulysses":
        return ulysses_attention(context, q, k, v, dropout=dropout, window=window, kernel=kernel, **shared)
    if dropout:
        raise NotImplementedError(
            f"parallel.cp_type: {context.method} has no dropout of attention probabilities; use ulysses"
        )
    if context.method == "kvallgather":
        return kvallgather_attention(context, q, k, v, window=window, **shared)
    if window is not None:
        raise NotImplementedError(
            "parallel.cp_type: ring has no sliding window, which this model has; use kvallgather or ulysses"
        )
    return ring_attention(context, q, k, v, **shared)
