"""Cross entropy over logits whose vocabulary may be split over ranks: none ever holds a whole row of them.

Rank r of n holds the logits of words [r V/n, (r+1) V/n), n dividing V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The target of a position that is not trained, as in `F.cross_entropy`."""


@dataclass(frozen=True)
class LossTerms:
    """What is added to the cross entropy of a token with logits x and target t, lse = log sum exp x.

    The loss is (1 - e) (lse - x_t) + e (lse - mean x) + z lse^2: ``smoothing`` e as in `F.cross_entropy`
    (Szegedy et al., "Rethinking the Inception Architecture", section 7), ``z_loss`` z as in PaLM (Chowdhery
    et al., section 5).
    """

    z_loss: float = 0.0
    smoothing: float = 0.0


PLAIN = LossTerms()


def cross_entropy_sum(
    local_logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None,
    terms: LossTerms = PLAIN,
) -> torch.Tensor:
    """The sum of the loss over all rows, [], fp32 (fp64 of fp64 logits), the same on every rank of ``group``.

    ``local_logits`` [L, V/n] of any floating dtype, ``targets`` [L] words of the whole vocabulary or -100,
    the same on every rank. L may be 0. One all-reduce of maxima [L] and one of sums [2, L] ([3, L]).
    ``group`` None: V is whole. The gradient is made in the forward, in one copy of the logits.
    """
    if not (torch.is_grad_enabled() and local_logits.requires_grad):
        return _losses_of(local_logits, targets, group, terms)[0].sum()
    return _CrossEntropy.apply(local_logits, targets, group, terms)  # pyright: ignore[reportReturnType]


def losses_and_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None,
    terms: LossTerms = PLAIN,
    factor: float = 1.0,
) -> torch.Tensor:
    """The loss of each row, [L]; ``logits`` [L, V/n] become the gradient of their sum, times ``factor``.

    Everything happens in the memory of ``logits``, fp32 or fp64. Nothing waits for the device.
    """
    words, size = (logits.shape[-1], 1) if group is None else (logits.shape[-1], group.size())
    column = targets if group is None else targets - group.rank() * words
    mine = (column >= 0) & (column < words)
    column, row = column.clamp(0, words - 1), torch.arange(len(targets), device=logits.device)

    top = logits.amax(-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(top[:, None])
    picked = logits[row, column].where(mine, 0.0)
    others = [logits.sum(-1)] if terms.smoothing else []
    sums = torch.stack([logits.exp_().sum(-1), picked, *others])
    if group is not None:
        dist.all_reduce(sums, group=group)

    # All relative to the largest logit of the row, so that no large numbers are subtracted.
    log_sum, trained = sums[0].log(), targets != IGNORED
    losses = log_sum - (1 - terms.smoothing) * sums[1]
    if terms.smoothing:
        losses -= terms.smoothing / (size * words) * sums[2]
    lse = log_sum + top
    if terms.z_loss:
        losses += terms.z_loss * lse.square()

    counted = trained.to(logits.dtype) * factor
    logits.mul_((counted * (1 + 2 * terms.z_loss * lse) / sums[0])[:, None])
    if terms.smoothing:
        logits.sub_((counted * (terms.smoothing / (size * words)))[:, None])
    logits[row, column] -= mine * counted * (1 - terms.smoothing)
    return losses.where(trained, 0.0)


def token_scores_(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[L, 2] of each row: the log-probability of its target, and 1 where no word is likelier, else 0.

    Of equally likely words the first counts. ``logits`` [L, V/n], fp32 or fp64, are used up.
    """
    words = logits.shape[-1]
    best, first = logits.max(-1)
    if group is not None:
        top = best.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        first = (first + group.rank() * words).where(best == top, words * group.size())
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    likeliest = (first == targets).to(logits.dtype)
    return torch.stack([-losses_and_gradient_(logits, targets, group), likeliest], -1)


def gather_vocabulary(local_logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[..., V/n] of each rank -> [..., V] on all.

    The gradient of a rank's own words is what it takes back: all ranks compute the same from the whole.
    """
    if group is None:
        return local_logits
    return _GatherVocabulary.apply(local_logits, group)  # pyright: ignore[reportReturnType]


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of ``dtype`` are taken."""
    return torch.promote_types(dtype, torch.float32)


def _losses_of(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """([L] losses, [L, V/n] gradient of their sum), the logits left as they are."""
    gradient = logits.detach().to(accumulated_in(logits.dtype), copy=True)
    return losses_and_gradient_(gradient, targets, group, terms), gradient


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
        terms: LossTerms,
    ) -> torch.Tensor:
        losses, gradient = _losses_of(logits, targets, group, terms)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        # In place: a later backward through the same graph sees the changed version and raises.
        return gradient.mul_(grads[0]).to(ctx.dtype), None, None, None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.words = group, logits.shape[-1]
        # The words lead in the buffer, so that ranks' parts lie behind one another.
        part = logits.movedim(-1, 0).contiguous()
        whole = part.new_empty(ctx.words * group.size(), *part.shape[1:])
        dist.all_gather_single(whole, part, group=group)
        return whole.movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].narrow(-1, ctx.group.rank() * ctx.words, ctx.words), None
