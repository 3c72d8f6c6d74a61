"""Attention of documents that are whole on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardyard.ops import flash
from shardyard.ops.blocks import Gradients, Merging, documents

Tensor = torch.Tensor
Kernel = Callable[..., Tensor]
"""(q, k, v, *, doc_lens, scale, window) -> output, with the shapes of `attend_documents`."""


def attend_documents(
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
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D of v]: causal, each document for itself.

    ``kernel`` None: one attention of PyTorch per document. Sinks and dropout have ways of their own.

    Raises:
        NotImplementedError: dropout together with sinks.
    """
    if sinks is not None:
        if dropout:
            raise NotImplementedError("dropout of attention probabilities does not go with attention sinks")
        return _WithSinks.apply(q, k, v, sinks, tuple(doc_lens), window, scale)  # pyright: ignore[reportReturnType]
    if kernel is not None and not dropout:
        return kernel(q, k, v, doc_lens=tuple(doc_lens), scale=scale, window=window)
    # A kernel that is given no query at all kills the process.
    lens = [length for length in doc_lens if length]
    outputs = [
        _attend(*document, scale, dropout, window)
        for document in zip(q.split(lens, 2), k.split(lens, 2), v.split(lens, 2), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, window: int | None) -> Tensor:
    length = q.shape[2]
    mask = None
    if window is not None and length > window:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def lean_documents(
    q: Tensor, k: Tensor, v: Tensor, *, doc_lens: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """One kernel call per document, straight into tensors that lie as the projections do, [1, T, H, D]: the
    output is kept once, for the backward of this and of the projection that follows.
    """
    lens = [length for length in doc_lens if length]
    return _Documents.apply(q, k, v, lens, window or flash.CAUSAL, scale)  # pyright: ignore[reportReturnType]


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lens: list[int], reach: int, scale: float
    ) -> Tensor:
        out = _tokens_first_in_memory(q, v.shape[-1])
        ctx.lens, ctx.reach, ctx.scale, lses = lens, reach, scale, []
        columns = (tensor.split(lens, 2) for tensor in (out, q, k, v))
        for target, *document in zip(*columns, strict=True):
            result, lse = flash.forward(document[0], document[1], document[2], reach, scale)
            target.copy_(result)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        if len(lses) == 1:
            alone = flash.backward(grads[0], q, k, v, out, lses[0], ctx.reach, ctx.scale)
            return *alone, None, None, None
        totals = [_tokens_first_in_memory(tensor, tensor.shape[-1]) for tensor in (q, k, v)]
        inputs = (tensor.split(ctx.lens, 2) for tensor in (grads[0], q, k, v, out))
        targets = (tensor.split(ctx.lens, 2) for tensor in totals)
        for lse, grad, a, b, c, result, *spaces in zip(lses, *inputs, *targets, strict=True):
            found = flash.backward(grad, a, b, c, result, lse, ctx.reach, ctx.scale)
            for target, gradient in zip(spaces, found, strict=True):
                target.copy_(gradient)
        return *totals, None, None, None


def _tokens_first_in_memory(like: Tensor, width: int) -> Tensor:
    """[1, H, T, width], uninitialised, stored as [1, T, H, width]."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, doc_lens, window, scale) -> Tensor:
        ctx.blocks, ctx.scale = documents(doc_lens, window), scale
        merging = Merging(q, v.shape[-1], scale)
        merging.meet(k, v, ctx.blocks)
        out, lse = merging.finish(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        back = Gradients(grads[0], q, out, lse, ctx.scale)
        dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (k, v))
        back.meet(k, v, ctx.blocks, dk, dv)
        return back.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), back.of_sinks(sinks), None, None, None
