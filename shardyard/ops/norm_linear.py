"""Linear layers that read normalised rows: what their weight's gradient needs is normalised again in the
backward, so that a norm's output is not kept.

A norm leaves on its output where it came from. A layer that gets that very tensor keeps the source, which the
norm keeps anyway; any other input (a gathered sequence, a piece) is kept as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor
_SOURCE = "normalised_from"


@dataclass
class Again:
    """A normalised tensor that is made again by ``make``, once for its readers' backwards, which follow one
    another.
    """

    make: Callable[..., Tensor]
    readers: int = 0
    made: Tensor | None = None

    def read(self, tensors: list[Tensor]) -> Tensor:
        made = self.make(*tensors) if self.made is None else self.made
        self.readers -= 1
        self.made = made if self.readers > 0 else None
        return made


class Source(NamedTuple):
    """What a normalised tensor is made of, and its version: one that was changed in place is another."""

    again: Again
    tensors: tuple[Tensor, ...]
    version: int


def leave_source(normed: Tensor, make: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``normed``, with a note of how to make it again."""
    if normed.requires_grad:
        parts = tuple(tensor.detach() for tensor in tensors)
        setattr(normed, _SOURCE, Source(Again(make), parts, normed._version))
    return normed


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        ctx.again = source.again
        source.again.readers += ctx.needs_input_grad[1]  # a frozen layer has no use for it
        ctx.save_for_backward(weight, *source.tensors)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, *tensors = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = rows.t() @ ctx.again.read(tensors).reshape(-1, weight.shape[1])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight, of_bias, None


def linear(layer: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer; what it reads of ``layer`` may be a view (tensor parallelism)."""
    source = getattr(input, _SOURCE, None)
    if source is None or source.version != input._version or not torch.is_grad_enabled():
        return F.linear(input, layer.weight, layer.bias)
    return _Linear.apply(input, layer.weight, layer.bias, source)  # pyright: ignore[reportReturnType]


def install_readers(block: nn.Module, width: int) -> bool:
    """Let the plain linear layers inside ``block`` that take rows of ``width`` look for a source.

    Returns:
        Whether there are any.
    """
    readers = [m for m in block.modules() if type(m) is nn.Linear and m.in_features == width]
    for layer in readers:
        if "forward" not in layer.__dict__:
            layer.forward = functools.partial(linear, layer)
    return bool(readers)
