"""Ulysses: each rank trades its stretch of all heads for all of the sequence of some heads.

Two exchanges a forward, one of queries, keys and values together and one of the outputs, and two a backward.
(DeepSpeed Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardyard.ops.context.share import ContextShare
from shardyard.ops.documents import Kernel, attend_documents

Tensor = torch.Tensor


def ulysses_attention(
    context: ContextShare,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_lens: Sequence[int],
    scale: float,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
    kernel: Kernel | None = None,
) -> Tensor:
    """q [1, H, T/cp, D], k and v [1, Hkv, T/cp, D] -> [1, H, T/cp, D of v]; rank r holds the r-th stretch.

    Raises:
        ValueError: the ranks do not divide the heads.
    """
    size, heads, kv_heads = context.size, q.shape[1], k.shape[1]
    if heads % size:
        raise ValueError(f"cp_type ulysses: {size} ranks of a sequence do not divide {heads} attention heads")
    copies = size // math.gcd(size, kv_heads)
    # [T/cp, ranks, heads of a rank x D]: what each rank is to get of a token lies together.
    parts = [
        tensor[0].transpose(0, 1).unflatten(1, (size, -1)).flatten(2)
        for tensor in (q, _repeated(k, copies), _repeated(v, copies))
    ]
    packed = torch.cat(parts, dim=2).transpose(0, 1).contiguous()
    sequence = _Exchange.apply(packed, context.group).flatten(0, 1)  # pyright: ignore[reportOptionalMemberAccess]
    q, k, v = (
        part.unflatten(1, (-1, width)).transpose(0, 1)[None]
        for part, width in zip(
            sequence.split([part.shape[2] for part in parts], dim=1),
            (q.shape[-1], k.shape[-1], v.shape[-1]),
            strict=True,
        )
    )
    if sinks is not None:
        sinks = sinks.chunk(size)[context.rank]
    out = attend_documents(
        q, k, v, doc_lens=doc_lens, scale=scale, dropout=dropout, window=window, sinks=sinks, kernel=kernel
    )
    back = out[0].transpose(0, 1).unflatten(0, (size, -1)).contiguous()
    # [ranks, T/cp, heads of a rank, D]: the ranks' heads in their order.
    mine: Any = _Exchange.apply(back, context.group)
    return mine.transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]


def _repeated(tensor: Tensor, copies: int) -> Tensor:
    """Key and value heads as often as the ranks need to get the same number each, and no more."""
    return tensor.repeat_interleave(copies, dim=1) if copies > 1 else tensor


class _Exchange(torch.autograd.Function):
    """[ranks, ...], one slice for each rank -> [ranks, ...], one slice from each; its own inverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        given = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(given, grads[0].contiguous(), group=ctx.group)
        return given, None
