"""The output layer and its cross entropy in one function, a few rows of logits at a time.

Logits of L rows and V words take L V numbers, and a plain cross entropy keeps three copies of them. Here one
copy exists, of a chunk of rows, in whose memory softmax and gradient are made too. Rows that fit one chunk
keep that copy for the backward. More than one chunk makes the gradients of hidden states and weight in the
forward, chunk by chunk, so that nothing of the size of logits outlives it; the backward multiplies them by
the gradient of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shardyard.ops.vocabulary import PLAIN, LossTerms, accumulated_in, losses_and_gradient_, token_scores_

_CHUNK_BYTES = {"cpu": 64 * 2**20}
"""What the logits of a chunk may take, by kind of device. See docs/loss.md for what was measured."""
_CHUNK_BYTES_ELSEWHERE = 2 * 2**30
_LEAST_ROWS = 32
_PRODUCT_ROWS = 8192
"""Words whose product is added to a sum of another dtype at a time."""
_LIFT = {torch.float16: 1024.0}
"""Gradients of logits are at most 1 and most of them tiny. Until the loss scale is known, in the backward,
this keeps them out of the range where fp16 loses them."""
_LEAST_FACTOR = 2.0**-14
"""Hidden states times less would leave fp16's range. Times this, lifted gradients are a 16th of what they
are, so that sums over many rows stay inside it too.
"""


@dataclass(frozen=True)
class Tail:
    """What a family does to the logits of its output layer: x -> cap tanh(scale x / cap), cap None leaves
    out the tanh.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class HeadLoss:
    """How the loss of an output layer is computed.

    ``chunk`` rows of logits exist at a time; None lets their bytes decide. ``group``: the ranks that share
    the vocabulary.
    """

    tail: Tail = Tail()
    terms: LossTerms = PLAIN
    chunk: int | None = None
    group: dist.ProcessGroup | None = None

    def rows(self, count: int, words: int, hidden_size: int, dtype: torch.dtype, device: str) -> int:
        """Rows of a chunk, of ``count`` rows of ``words`` logits on this rank: chunks of about equal size."""
        if self.chunk is not None:
            return self.chunk
        wide = accumulated_in(dtype)
        is_narrow = wide is not dtype
        # fp32 for softmax and gradient, beside it the product and the gradient in a narrower dtype, and the
        # slope of a tanh.
        each = wide.itemsize * (1 if self.tail.cap is None else 2) + 2 * dtype.itemsize * is_narrow
        # Each chunk adds to the whole weight's gradient: one as large as a quarter of it makes up for that.
        gradient = words * hidden_size * wide.itemsize
        bound = max(_CHUNK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE), gradient // 4)
        limit = max(_LEAST_ROWS, bound // (words * each))
        # Chunks of a narrow dtype cost the weight's gradient in fp32: so many rows are no larger whole.
        spared = hidden_size * wide.itemsize // each * is_narrow
        pieces = 1 if count <= limit + spared else math.ceil(count / limit)
        return max(1, math.ceil(count / pieces))


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    loss: HeadLoss | None = None,
) -> torch.Tensor:
    """The sum of the loss of ``hidden`` [L, H] against ``targets`` [L], fp32 (fp64 of fp64 inputs), [].

    ``weight`` [V/n, H] and ``bias`` [V/n] are this rank's words, in the dtype of ``hidden``; targets are
    words of the whole vocabulary or -100. L may be 0. With a group its ranks call this with the same hidden
    states and targets, get the same number, and each the gradient of ``hidden`` that its own words give. Two
    all-reduces a chunk. The backward runs once.
    """
    loss = loss or HeadLoss()
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    words, hidden_size = weight.shape
    rows = loss.rows(len(targets), words, hidden_size, weight.dtype, weight.device.type)
    if not needs_gradient:
        chunks = _Chunks(hidden, weight, targets, bias, loss, rows)
        return chunks.total(chunks.losses(start) for start in chunks.starts)
    whole = len(targets) <= rows
    return (_Whole if whole else _InChunks).apply(  # pyright: ignore[reportReturnType]
        hidden, weight, bias, targets, loss, rows
    )


def linear_token_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    loss: HeadLoss | None = None,
) -> torch.Tensor:
    """[L, 2] as `token_scores_` gives them, of the arguments of `linear_cross_entropy_sum`; no gradient."""
    loss = loss or HeadLoss()
    words, hidden_size = weight.shape
    rows = loss.rows(len(targets), words, hidden_size, weight.dtype, weight.device.type)
    chunks = _Chunks(hidden, weight, targets, bias, loss, rows)
    parts = [chunks.scores(start) for start in chunks.starts]
    return torch.cat(parts) if parts else chunks.logits.new_zeros(0, 2)


class _Chunks:
    """Logits, losses and gradients of one chunk of rows after the other, in the same memory."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        loss: HeadLoss,
        rows: int,
    ) -> None:
        self.weight, self.targets, self.loss, self.rows = weight.detach(), targets, loss, rows
        # Scaling what enters costs a V-th of scaling logits.
        scale = loss.tail.scale
        self.hidden = hidden.detach() if scale == 1.0 else hidden.detach() * scale
        self.bias = None if bias is None else bias.detach() * scale
        self.dtype, self.wide = weight.dtype, accumulated_in(weight.dtype)
        self.lift = _LIFT.get(weight.dtype, 1.0)
        self.starts = range(0, len(targets), rows)
        shape = (min(rows, len(targets)), weight.shape[0])
        self.logits = torch.empty(shape, dtype=self.wide, device=weight.device)

    def losses(self, start: int) -> torch.Tensor:
        """[n] of the rows from ``start``; ``logits`` [:n] become the gradient of the layer's own logits."""
        logits, targets, slope = self._tailed(start)
        losses = losses_and_gradient_(logits, targets, self.loss.group, self.loss.terms, self.lift)
        if slope is not None:
            logits.mul_(slope)
        return losses

    def scores(self, start: int) -> torch.Tensor:
        """[n, 2] of the rows from ``start``, as `token_scores_` gives them."""
        logits, targets, _ = self._tailed(start)
        return token_scores_(logits, targets, self.loss.group)

    def _tailed(self, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The family's logits of the rows from ``start``, their targets, and the slope of the cap."""
        rows = slice(start, start + self.rows)
        targets, cap = self.targets[rows], self.loss.tail.cap
        logits, slope = self.logits[: len(targets)], None
        self._multiply(self.hidden[rows], logits)
        if cap is not None:
            slope = 1 - logits.div_(cap).tanh_().square()
            logits.mul_(cap)
        return logits, targets, slope

    def total(self, losses: Any) -> torch.Tensor:
        """The sum over all chunks: of rows, so that it does not depend on where chunks end."""
        parts = list(losses)
        return torch.cat(parts).sum() if parts else self.logits.new_zeros(())

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        weight = self.weight.t()
        if self.dtype is not self.wide:
            out.copy_(hidden @ weight if self.bias is None else torch.addmm(self.bias, hidden, weight))
        elif self.bias is None:
            torch.mm(hidden, weight, out=out)
        else:
            torch.addmm(self.bias, hidden, weight, out=out)


class _Whole(torch.autograd.Function):
    """One chunk: the gradient of its logits is kept, in their memory."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, loss: HeadLoss, rows: int
    ) -> Any:
        chunks = _Chunks(hidden, weight, targets, bias, loss, rows)
        total = chunks.total([chunks.losses(0)])
        ctx.save_for_backward(chunks.logits.to(chunks.dtype), hidden, weight)
        ctx.scale, ctx.lift = loss.tail.scale, chunks.lift
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = of_bias = None
        factor = grads[0] * (ctx.scale / ctx.lift)  # of the small tensors, never of one with V numbers a row
        if ctx.needs_input_grad[0]:
            of_hidden = (gradient @ weight).mul_(factor)
        if ctx.needs_input_grad[1]:
            of_weight = _scaled_product(gradient.t(), hidden, factor)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0, dtype=accumulated_in(gradient.dtype)).mul_(factor).to(gradient.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


def _scaled_product(columns: torch.Tensor, hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``factor`` times ``columns`` [V/n, L] times ``hidden`` [L, H], in their dtype."""
    if hidden.dtype is not torch.float16:
        return columns @ (hidden * factor).to(hidden.dtype)
    first = factor.clamp(min=_LEAST_FACTOR)
    return (columns @ (hidden * first).to(hidden.dtype)).mul_(factor / first)


class _InChunks(torch.autograd.Function):
    """Several chunks: gradients are made here, and wait for the factor that the backward brings."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, loss: HeadLoss, rows: int
    ) -> Any:
        chunks = _Chunks(hidden, weight, targets, bias, loss, rows)
        wants = ctx.needs_input_grad
        of_hidden = torch.empty_like(chunks.hidden) if wants[0] else None
        of_weight = _Sum(weight.shape, chunks) if wants[1] else None
        of_bias = chunks.logits.new_zeros(weight.shape[0]) if wants[2] else None
        losses = []
        for start in chunks.starts:
            losses.append(chunks.losses(start))
            entering = chunks.hidden[start : start + rows]
            gradient = chunks.logits[: len(entering)]
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(chunks.dtype)
            if of_hidden is not None:
                torch.mm(gradient, chunks.weight, out=of_hidden[start : start + rows])
            if of_weight is not None:
                of_weight.add(gradient, entering)
        # Not among the saved tensors: those keep a reference while the gradient is handed on, and the
        # parameter would copy it.
        ctx.made = [of_hidden, None if of_weight is None else of_weight.value, of_bias]
        ctx.dtype, ctx.scale, ctx.lift = chunks.dtype, loss.tail.scale, chunks.lift
        return chunks.total(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("the backward of this loss has run, and its gradients are handed on")
        made, ctx.made = ctx.made, None
        factor = grads[0] / ctx.lift
        # Hidden states and bias were scaled as they came in, so their gradients are scaled as they leave;
        # the weight's has met the scaled hidden states.
        for tensor, scale in zip(made, (ctx.scale, 1.0, ctx.scale), strict=True):
            if tensor is not None:
                tensor.mul_(factor * scale)
        return *(None if tensor is None else tensor.to(ctx.dtype) for tensor in made), None, None, None


class _Sum:
    """The gradient of the weight [V/n, H], added up over chunks; in fp32 where the products are narrower."""

    def __init__(self, shape: torch.Size, chunks: _Chunks) -> None:
        self.value = torch.empty(shape, dtype=chunks.wide, device=chunks.logits.device)
        self.is_empty = True

    def add(self, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add ``gradient`` [n, V/n] transposed times ``hidden`` [n, H]."""
        columns = gradient.t()
        if gradient.dtype is self.value.dtype:
            torch.addmm(self.value, columns, hidden, beta=0 if self.is_empty else 1, out=self.value)
        else:
            self._add_narrow(columns, hidden)
        self.is_empty = False

    def _add_narrow(self, columns: torch.Tensor, hidden: torch.Tensor) -> None:
        if hidden.dtype is torch.float16:  # a product of lifted gradients may be too large for it
            hidden = hidden.float()
        if self.is_empty:
            self.value.zero_()
        for start in range(0, len(columns), _PRODUCT_ROWS):
            words = slice(start, start + _PRODUCT_ROWS)
            self.value[words] += columns[words].to(hidden.dtype) @ hidden
