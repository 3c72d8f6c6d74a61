"""Attention of documents that are whole on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardyard.ops.blocks import Gradients, Merging, documents

Tensor = torch.Tensor


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
) -> Tensor:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D of v]: causal, each document for itself.

    Raises:
        NotImplementedError: dropout together with sinks.
    """
    if sinks is not None:
        if dropout:
            raise NotImplementedError("dropout of attention probabilities does not go with attention sinks")
        return _WithSinks.apply(q, k, v, sinks, tuple(doc_lens), window, scale)  # pyright: ignore[reportReturnType]
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
