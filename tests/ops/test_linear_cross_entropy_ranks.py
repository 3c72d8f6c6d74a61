"""The same function over a vocabulary that ranks share, against one rank that has it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardyard.ops.linear_cross_entropy import HeadLoss, Tail, linear_cross_entropy_sum
from shardyard.ops.vocabulary import LossTerms

ROWS, HIDDEN, WORDS = 11, 6, 24
TAIL, TERMS = Tail(0.5, 3.0), LossTerms(0.05, 0.1)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(9)
    shapes = ((ROWS, HIDDEN), (WORDS, HIDDEN), (WORDS,))
    made = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    targets = torch.randint(0, WORDS, (ROWS,), generator=generator)
    targets[:5] = torch.tensor([0, 23, 6, -100, 12])
    return *made, targets


def shared(chunk: int | None, terms: LossTerms, rows: int) -> list[torch.Tensor]:
    """(loss, gradients of hidden, weight and bias) of this rank's words; the calls of collectives last."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    hidden, weight, bias, targets = inputs()
    hidden, targets = hidden[:rows], targets[:rows]
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [hidden.clone(), weight.chunk(world)[rank].clone(), bias.chunk(world)[rank].clone()]
    leaves = [tensor.requires_grad_() for tensor in mine]
    loss = HeadLoss(TAIL, terms, chunk, dist.group.WORLD)
    with CommDebugMode() as comm:
        value = linear_cross_entropy_sum(leaves[0], leaves[1], targets, leaves[2], loss)
        gradients = torch.autograd.grad(0.37 * value, leaves)
    return [value.detach(), *gradients, torch.tensor(comm.get_total_counts())]


def whole(terms: LossTerms, rows: int) -> list[torch.Tensor]:
    hidden, weight, bias, targets = inputs()
    leaves = [tensor.requires_grad_() for tensor in (hidden[:rows].clone(), weight, bias)]
    value = linear_cross_entropy_sum(leaves[0], leaves[1], targets[:rows], leaves[2], HeadLoss(TAIL, terms))
    return [value.detach(), *torch.autograd.grad(0.37 * value, leaves)]


@pytest.mark.parametrize(("world", "chunk"), [(2, None), (2, 4), (4, 1), (4, None)])
def test_ranks_that_share_the_vocabulary_get_the_same_loss_and_their_part_of_the_gradients(
    ranks, world, chunk
):
    results: list[Any] = ranks.run(world, shared, chunk, TERMS, ROWS)
    value, of_hidden, of_weight, of_bias = whole(TERMS, ROWS)
    for result in results:
        torch.testing.assert_close(result[0], value, rtol=1e-12, atol=0)
        assert result[4].item() == 2 * (1 if chunk is None else -(-ROWS // chunk))  # two a chunk
    # A rank's gradient of the hidden states is what its words give; the body's gather adds them up.
    torch.testing.assert_close(sum(r[1] for r in results), of_hidden, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), of_weight, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), of_bias, rtol=1e-10, atol=1e-12)


def test_no_rows_are_a_loss_of_zero_on_every_rank(ranks):
    for value, of_hidden, of_weight, of_bias, _ in ranks.run(2, shared, None, LossTerms(), 0):
        assert value == 0 and of_hidden.shape == (0, HIDDEN)
        assert of_weight.shape == (WORDS // 2, HIDDEN) and not of_weight.any() and not of_bias.any()
