"""Attention written out: what every other way of computing it is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def softmax_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_lens: Sequence[int],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D of v] from one full matrix of scores, in fp64."""
    total, copies = q.shape[2], q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(copies, 1), v.double().repeat_interleave(copies, 1)
    document = torch.repeat_interleave(torch.arange(len(doc_lens)), torch.tensor(doc_lens))
    position = torch.arange(total)
    distance = position[:, None] - position[None]
    seen = (document[:, None] == document[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, -1, total, 1)], dim=-1)
    return scores.softmax(-1)[..., :total] @ v


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of the expected numbers unless all are 0."""
    difference, scale = (found.double() - expected).abs().max().item(), expected.abs().max().item()
    return difference / scale if scale else difference
