"""Ring attention: queries stay, keys and values go round.

Each rank holds chunks r and 2 cp - 1 - r of each document (see ``shardyard.parallel.sequence``), so all have
the same work in every step. Keys and values travel while the block that is here is computed: cp - 1 exchanges
forward; backward as many again, and cp of the gradients of keys and values, which end where they belong.
(arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardyard.ops import flash
from shardyard.ops.blocks import Block, Gradients, Merging
from shardyard.ops.context.share import ContextShare

Tensor = torch.Tensor


def ring_attention(
    context: ContextShare,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_lens: Sequence[int],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [1, H, T/cp, D], k and v [1, Hkv, T/cp, D] -> [1, H, T/cp, D of v]; 2 cp divides each document."""
    local = tuple(length // context.size for length in doc_lens)
    return _Ring.apply(q, k, v, sinks, context, local, scale)  # pyright: ignore[reportReturnType]


def ring_blocks(local_lens: Sequence[int], rank: int, source: int) -> list[Block]:
    """What a rank's queries meet in the keys of rank ``source``; lengths are those of documents' shares."""
    blocks, start = [], 0
    for length in local_lens:
        middle, stop = start + length // 2, start + length
        whole = slice(start, stop)
        if source == rank:  # in the order of the sequence on both sides
            blocks.append(Block(whole, whole, flash.CAUSAL))
        elif source < rank:  # its head is before both of our chunks, its tail after both
            blocks.append(Block(whole, slice(start, middle), None))
        else:  # both of its chunks lie between ours
            blocks.append(Block(slice(middle, stop), whole, None))
        start = stop
    return blocks


class _Passing:
    """A tensor on its way to the next rank, and another from the one before."""

    def __init__(self, tensor: Tensor, context: ContextShare):
        self._sent, self._received = tensor, torch.empty_like(tensor)
        after, before = (context.rank + 1) % context.size, (context.rank - 1) % context.size
        send = dist.P2POp(dist.isend, tensor, group=context.group, group_peer=after)
        receive = dist.P2POp(dist.irecv, self._received, group=context.group, group_peer=before)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sinks, context: ContextShare, local_lens, scale) -> Tensor:
        ctx.context, ctx.local_lens, ctx.scale = context, local_lens, scale
        merging = Merging(q, v.shape[-1], scale)
        travelling = torch.cat([k, v], dim=-1)
        for step in range(context.size):
            passing = _Passing(travelling, context) if step + 1 < context.size else None
            blocks = ring_blocks(local_lens, context.rank, (context.rank - step) % context.size)
            keys, values = travelling.split([k.shape[-1], v.shape[-1]], dim=-1)
            merging.meet(keys, values, blocks)
            if passing is not None:
                travelling = passing.wait()
        out, lse = merging.finish(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        context, widths = ctx.context, [k.shape[-1], v.shape[-1]]
        back = Gradients(grads[0], q, out, lse, ctx.scale)
        travelling = torch.cat([k, v], dim=-1)
        coming = None
        for step in range(context.size):
            passing = _Passing(travelling, context) if step + 1 < context.size else None
            blocks = ring_blocks(ctx.local_lens, context.rank, (context.rank - step) % context.size)
            gradient = torch.zeros_like(travelling, dtype=lse.dtype)
            (keys, values), (dk, dv) = (tensor.split(widths, dim=-1) for tensor in (travelling, gradient))
            back.meet(keys, values, blocks, dk, dv)
            if coming is not None:
                gradient += coming.wait()
            coming = _Passing(gradient, context)
            if passing is not None:
                travelling = passing.wait()
        assert coming is not None
        dk, dv = coming.wait().split(widths, dim=-1)
        of_sinks = back.of_sinks(sinks) if sinks is not None else None
        return back.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None
