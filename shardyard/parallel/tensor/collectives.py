"""The two collectives of sequence parallelism, each the other's backward.

Between regions a rank holds tokens [r T/n, (r+1) T/n) of its sequence; inside a region it holds all T.
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", section 4.2: g, g-bar.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T/n, ...] of each rank -> [B, T, ...] on all; the backward sums all ranks' gradients and cuts."""
    return _Gather.apply(x, group)  # pyright: ignore[reportReturnType]


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, ...] partial sums of each rank -> [B, T/n, ...], this rank's tokens of the sum over ranks.

    Raises:
        ValueError: T is no multiple of the ranks.
    """
    if x.shape[1] % group.size():
        raise ValueError(f"{x.shape[1]} tokens do not divide over {group.size()} tensor parallel ranks")
    return _Scatter.apply(x, group)  # pyright: ignore[reportReturnType]


# Ranks' parts lie behind one another along the first dimension of a collective's buffer. Swapping batch and
# sequence puts the sequence there; with a batch of 1, as in training, that copies nothing. The result is no
# view: FSDP's hooks on a module's output do not survive a change of a view in place.


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] * group.size(), *x.shape[2:])
    return _into(out, lambda buffer: dist.all_gather_single(buffer, _sequence_first(x), group=group))


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
    return _into(out, lambda buffer: dist.reduce_scatter_single(buffer, _sequence_first(x), group=group))


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous()


def _into(out: torch.Tensor, collective: Callable[[torch.Tensor], object]) -> torch.Tensor:
    buffer = _sequence_first(out)
    collective(buffer)
    if buffer.data_ptr() != out.data_ptr():
        out.copy_(buffer.transpose(0, 1))
    return out
