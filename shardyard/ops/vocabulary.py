"""Cross entropy over logits whose vocabulary is split over ranks: no rank ever holds a whole row of them.

Rank r of n holds the logits of words [r V/n, (r+1) V/n), n dividing V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

IGNORED = -100
"""The target of a position that is not trained, as in `F.cross_entropy`."""


def cross_entropy_sum(
    local_logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The sum of the cross entropy in fp32, [], the same on every rank of ``group``.

    ``local_logits`` [L, V/n] of any floating dtype, ``targets`` [L] words of the whole vocabulary or -100,
    the same on every rank. L may be 0. One all-reduce of maxima [L] and one of sums [2, L]. ``group`` None:
    V is whole. The backward takes the softmax's memory for the gradient, so it runs once (a second one is an
    error).
    """
    if group is None:
        return F.cross_entropy(local_logits.float(), targets, reduction="sum", ignore_index=IGNORED)
    return _SplitCrossEntropy.apply(local_logits, targets, group)  # pyright: ignore[reportReturnType]


def gather_vocabulary(local_logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[..., V/n] of each rank -> [..., V] on all.

    The gradient of a rank's own words is what it takes back: all ranks compute the same from the whole.
    """
    if group is None:
        return local_logits
    return _GatherVocabulary.apply(local_logits, group)  # pyright: ignore[reportReturnType]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        rows, words = logits.shape
        column = targets - group.rank() * words
        mine = torch.nonzero((column >= 0) & (column < words)).squeeze(-1)
        column = column.index_select(0, mine)
        trained = targets != IGNORED

        top = logits.amax(-1).float() if rows else logits.new_empty(0, dtype=torch.float32)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        softmax = logits.float() - top[:, None]  # a tensor of our own: the rest happens in its memory
        sums = softmax.new_zeros(2, rows)
        sums[1, mine] = softmax[mine, column]
        torch.sum(softmax.exp_(), -1, out=sums[0])
        dist.all_reduce(sums, group=group)
        softmax.div_(sums[0, :, None])

        ctx.save_for_backward(softmax, mine, column, trained)
        ctx.dtype = logits.dtype
        return ((sums[0].log() - sums[1]) * trained).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, mine, column, trained = ctx.saved_tensors
        # In place: a later backward through the same graph sees the changed version and raises.
        softmax.mul_((trained * grads[0])[:, None])
        softmax[mine, column] -= grads[0]
        return softmax.to(ctx.dtype), None, None


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
