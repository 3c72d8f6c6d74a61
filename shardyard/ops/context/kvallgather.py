"""Keys and values of the whole sequence on every rank, queries where they are.

Ranks hold chunks r and 2 cp - 1 - r of each document, as in the ring. One all-gather forward; backward one
more, rather than keeping what it brought, and one reduce-scatter of the gradients. (Llama 3,
arXiv:2407.21783, section 3.3.2.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardyard.ops.blocks import Block, Gradients, Merging, stretch
from shardyard.ops.context.share import ContextShare

Tensor = torch.Tensor


def kvallgather_attention(
    context: ContextShare,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_lens: Sequence[int],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [1, H, T/cp, D], k and v [1, Hkv, T/cp, D] -> [1, H, T/cp, D of v]; 2 cp divides each document."""
    return _Gathered.apply(q, k, v, sinks, context, tuple(doc_lens), window, scale)  # pyright: ignore[reportReturnType]


def gathered_blocks(doc_lens: Sequence[int], rank: int, size: int, window: int | None) -> list[Block]:
    """What a rank's queries meet in the keys of whole documents end to end."""
    blocks, query_at, key_at = [], 0, 0
    for length in doc_lens:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            first, last = number * chunk, (number + 1) * chunk
            blocks += stretch(first, last, query_at=query_at, key_at=key_at, window=window)
            query_at += chunk
        key_at += length
    return blocks


@functools.lru_cache(maxsize=16)
def _orders(doc_lens: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of the sequence as places in the ranks' shares end to end, and the other way round.

    Cached for the layers of a model, which all ask for the same.
    """
    local = sum(doc_lens) // size
    pieces, start = [], 0
    for length in doc_lens:
        chunk = length // (2 * size)
        heads = torch.arange(size)[:, None] * local + start + torch.arange(chunk)
        pieces += [heads.flatten(), (heads + chunk).flip(0).flatten()]
        start += 2 * chunk
    order = torch.cat(pieces)
    return order.to(device), order.argsort().to(device)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sinks, context: ContextShare, doc_lens, window, scale) -> Tensor:
        ctx.context, ctx.doc_lens, ctx.scale = context, doc_lens, scale
        ctx.blocks = gathered_blocks(doc_lens, context.rank, context.size, window)
        merging = Merging(q, v.shape[-1], scale)
        merging.meet(*_gather(k, v, context, doc_lens), ctx.blocks)
        out, lse = merging.finish(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        back = Gradients(grads[0], q, out, lse, ctx.scale)
        whole = _gather(k, v, ctx.context, ctx.doc_lens)
        dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in whole)
        back.meet(*whole, ctx.blocks, dk, dv)
        dk, dv = _scatter(dk, dv, ctx.context, ctx.doc_lens)
        of_sinks = back.of_sinks(sinks) if sinks is not None else None
        return back.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None, None


def _gather(k: Tensor, v: Tensor, context: ContextShare, doc_lens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """[1, Hkv, T/cp, D] each -> [1, Hkv, T, D] each, in the order of the sequence."""
    mine = torch.cat([k, v], dim=-1)[0].transpose(0, 1).contiguous()
    gathered = mine.new_empty((context.size * mine.shape[0], *mine.shape[1:]))
    dist.all_gather_single(gathered, mine, group=context.group)
    order, _ = _orders(doc_lens, context.size, k.device)
    k, v = gathered[order].transpose(0, 1)[None].split([k.shape[-1], v.shape[-1]], dim=-1)
    return k, v


def _scatter(
    dk: Tensor, dv: Tensor, context: ContextShare, doc_lens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The transpose of ``_gather``: every rank's share, summed over the ranks."""
    _, place = _orders(doc_lens, context.size, dk.device)
    shares = torch.cat([dk, dv], dim=-1)[0].transpose(0, 1)[place]
    mine = shares.new_empty((shares.shape[0] // context.size, *shares.shape[1:]))
    dist.reduce_scatter_single(mine, shares, group=context.group)
    dk, dv = mine.transpose(0, 1)[None].split([dk.shape[-1], dv.shape[-1]], dim=-1)
    return dk, dv
