"""Softmax attention of one block of queries over one block of keys, with its log-sum-exp: the one place that
calls a kernel.

The log-sum-exp lets partial results be merged, and a backward that is given the merged output and the merged
log-sum-exp returns exactly this block's share of the gradients (the derivation of FlashAttention 2,
arXiv:2307.08691, section 3.1). PyTorch's public attention does not hand it out, so the kernels behind it are
called: the fused one on a CPU, FlashAttention on an NVIDIA GPU, and elsewhere plain matrix products in pieces
that keep memory bounded.

Shapes: query and output [1, H, Q, D], key and value [1, Hkv, K, D] with Hkv dividing H (grouped queries,
never expanded); the value's D may differ. log-sum-exp is natural, [1, H, Q], at least fp32. Neither Q nor K
is 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

CAUSAL = sys.maxsize
"""A reach without limit: a query sees every key up to its own."""

# Scores that exist at one time in the plain kernel, per batch of query rows.
_PLAIN_SCORES = 1 << 25
_aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, reach: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp.

    ``reach`` None: every query sees every key. Else the last query stands at the last key, the one before at
    the one before, and each sees ``reach`` keys that end with its own.
    """
    width = v.shape[-1]
    q, k, v = _one_width(q, k, v)
    if _is_cpu(q):
        parts = [
            _cpu_forward(q[:, :, a], k[:, :, b], v[:, :, b], r, scale) for a, b, r in _pieces(q, k, reach)
        ]
    elif _has_gpu_kernel(q):
        parts = [_gpu_forward(q, k, v, reach, scale)]
    else:
        parts = [
            _plain_forward(q[:, :, a], k[:, :, b], v[:, :, b], r, scale) for a, b, r in _pieces(q, k, reach)
        ]
    if len(parts) == 1:
        out, lse = parts[0]
    else:
        out, lse = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
    return out[..., :width], lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k, v; ``out`` and ``lse`` are of all keys the queries see."""
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    q, k, v, out, grad = _one_width(q, k, v, out, grad)
    if not _is_cpu(q) and _has_gpu_kernel(q):
        grads = _gpu_backward(grad, q, k, v, out, lse, reach, scale)
    else:
        kernel = _cpu_backward if _is_cpu(q) else _plain_backward
        grads = _by_pieces(kernel, grad, q, k, v, out, lse, reach, scale)
    dq, dk, dv = (tensor[..., :width] for tensor, width in zip(grads, widths, strict=True))
    return dq, dk, dv


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what partial results are added up."""
    return torch.promote_types(dtype, torch.float32)


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Kernels want one head size, on a GPU a multiple of 8; zeros change neither scores nor other columns."""
    width = max(tensor.shape[-1] for tensor in tensors)
    if not _is_cpu(tensors[0]):
        width = -(-width // 8) * 8
    return [padded(tensor, width) for tensor in tensors]


def padded(tensor: Tensor, width: int) -> Tensor:
    """With zeros up to ``width``; one that is as wide is not copied, as PyTorch's own function does."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _is_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _has_gpu_kernel(q: Tensor) -> bool:
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _pieces(q: Tensor, k: Tensor, reach: int | None) -> Iterator[tuple[slice, slice, int | None]]:
    """The queries in pieces, each with the keys that it can see: the kernels that know no reach pay for every
    key they are given, and the plain one holds all scores of a piece.
    """
    queries, keys = q.shape[2], k.shape[2]
    rows = queries
    if not _is_cpu(q):
        rows = max(16, _PLAIN_SCORES // (q.shape[1] * keys))
    if reach is not None and reach < keys:
        rows = min(rows, max(reach, 128))
    ahead = keys - queries
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        if reach is None:
            yield slice(start, stop), slice(0, keys), None
        else:
            yield slice(start, stop), slice(max(0, start + ahead + 1 - reach), stop + ahead), reach


def _by_pieces(kernel, grad, q, k, v, out, lse, reach, scale) -> tuple[Tensor, Tensor, Tensor]:
    pieces = list(_pieces(q, k, reach))
    if len(pieces) == 1:
        return kernel(grad, q, k, v, out, lse, reach, scale)
    dtype = accumulator(q.dtype)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (q, k, v))
    for a, b, r in pieces:
        grads = kernel(
            grad[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out[:, :, a], lse[:, :, a], r, scale
        )
        dq[:, :, a], dk[:, :, b], dv[:, :, b] = grads[0], dk[:, :, b] + grads[1], dv[:, :, b] + grads[2]
    return dq, dk, dv


def _hidden(queries: int, keys: int, reach: int, device: torch.device) -> Tensor:
    """bool [Q, K]: what a query does not see."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance < 0) | (distance >= reach)


def _cpu_mask(q: Tensor, k: Tensor, reach: int | None) -> tuple[bool, Tensor | None]:
    """Causal, or an additive mask. The kernel's own causality aligns the first query with the first key."""
    queries, keys = q.shape[2], k.shape[2]
    if reach is None or (reach >= keys and queries == keys):
        return reach is not None, None
    mask = torch.zeros(queries, keys, dtype=q.dtype)
    return False, mask.masked_fill_(_hidden(queries, keys, reach, q.device), float("-inf"))[None, None]


def _cpu_forward(q, k, v, reach, scale) -> tuple[Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, reach)
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def _cpu_backward(grad, q, k, v, out, lse, reach, scale) -> tuple[Tensor, Tensor, Tensor]:
    causal, mask = _cpu_mask(q, k, reach)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


def _gpu_arguments(q: Tensor, k: Tensor, reach: int | None) -> tuple[tuple, dict[str, int]]:
    """What forward and backward share: one sequence of the kernel for sequences of several lengths, as
    torch.nn.attention.varlen calls it.
    """
    ends = [_ends(tensor.shape[2], q.device) for tensor in (q, k)]
    windows = {}
    if reach is not None and reach < k.shape[2]:
        windows = {"window_size_left": reach - 1, "window_size_right": 0}
    return (*ends, q.shape[2], k.shape[2], 0.0, reach is not None and not windows), windows


@functools.lru_cache(maxsize=1024)
def _ends(length: int, device: torch.device) -> Tensor:
    """Cached, for each copy to a GPU waits for it."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor[0].transpose(0, 1) for tensor in tensors]


def _gpu_forward(q, k, v, reach, scale) -> tuple[Tensor, Tensor]:
    arguments, windows = _gpu_arguments(q, k, reach)
    out, lse, *_ = _aten._flash_attention_forward(
        *_tokens_first(q, k, v), *arguments, return_debug_mask=False, scale=scale, **windows
    )
    return out.transpose(0, 1)[None], lse[None]


def _gpu_backward(grad, q, k, v, out, lse, reach, scale) -> tuple[Tensor, ...]:
    arguments, windows = _gpu_arguments(q, k, reach)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    grad, q, k, v, out = _tokens_first(grad, q, k, v, out)
    grads = _aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out.contiguous(), lse[0].contiguous(), *arguments, no_dropout, unused,
        scale=scale, **windows,
    )  # fmt: skip
    return tuple(tensor.transpose(0, 1)[None] for tensor in grads)


def _probabilities(q, k, reach, scale) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [Hkv, G, Q, K] of G queries to a key head, and the operands in the accumulator's type."""
    dtype = accumulator(q.dtype)
    groups, keys = q[0].unflatten(0, (k.shape[1], -1)).to(dtype), k[0].to(dtype)
    scores = groups @ keys[:, None].transpose(-1, -2) * scale
    if reach is not None:
        scores = scores.masked_fill(_hidden(q.shape[2], k.shape[2], reach, q.device), float("-inf"))
    return scores, groups, keys


def _plain_forward(q, k, v, reach, scale) -> tuple[Tensor, Tensor]:
    scores, _, _ = _probabilities(q, k, reach, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v[0, :, None].to(lse.dtype)
    return out.flatten(0, 1)[None].to(q.dtype), lse.flatten(0, 1)[None]


def _plain_backward(grad, q, k, v, out, lse, reach, scale) -> tuple[Tensor, Tensor, Tensor]:
    scores, groups, keys = _probabilities(q, k, reach, scale)
    shape = groups.shape[:2]
    grad, out = (tensor[0].unflatten(0, shape).to(groups.dtype) for tensor in (grad, out))
    probabilities = (scores - lse[0].unflatten(0, shape)[..., None]).exp()
    dv = (probabilities.transpose(-1, -2) @ grad).sum(1)
    of_probabilities = grad @ v[0, :, None].to(grad.dtype).transpose(-1, -2)
    of_scores = probabilities * (of_probabilities - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (of_scores @ keys[:, None]).flatten(0, 1)
    dk = (of_scores.transpose(-1, -2) @ groups).sum(1)
    return dq[None], dk[None], dv[None]
