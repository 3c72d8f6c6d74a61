"""Cross entropy and logits over a split vocabulary, against torch on the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROWS, WORDS = 7, 24


def logits_and_targets(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets in every slice of the vocabulary, its first and last word, and two that are not trained."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, WORDS, generator=generator) * scale).to(dtype)
    return logits, torch.tensor([0, 23, 6, -100, 13, 18, -100])


def split_loss(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of this rank's words) of half the loss."""
    import torch.distributed as dist

    from shardyard.ops.vocabulary import cross_entropy_sum

    logits, targets = logits_and_targets(dtype, scale)
    group = dist.group.WORLD
    mine = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    loss = cross_entropy_sum(mine, targets, group)
    (0.5 * loss).backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    return loss.detach(), mine.grad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [(torch.float32, 1.0, 1e-6), (torch.float32, 1e4, 1e-6), (torch.bfloat16, 3.0, 4e-3)],
    ids=["fp32", "large logits", "bf16"],
)
def test_loss_and_gradient_equal_torch_on_the_whole_vocabulary(world, dtype, scale, tolerance, ranks):
    logits, targets = logits_and_targets(dtype, scale)
    whole = logits.float().requires_grad_()
    reference = F.cross_entropy(whole, targets, reduction="sum")
    (0.5 * reference).backward()
    results = ranks.run(world, split_loss, dtype, scale)
    for loss, _ in results:
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, reference.detach(), rtol=1e-6, atol=0)
    gradient = torch.cat([part for _, part in results], -1).float()
    torch.testing.assert_close(gradient, whole.grad, rtol=tolerance, atol=1e-7)


def without_rows() -> tuple[float, tuple[int, ...]]:
    import torch.distributed as dist

    from shardyard.ops.vocabulary import cross_entropy_sum

    logits = torch.zeros(0, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(0, dtype=torch.int64), dist.group.WORLD)
    loss.backward()
    assert logits.grad is not None
    return loss.item(), tuple(logits.grad.shape)


def test_no_rows_are_a_loss_of_zero_on_every_rank(ranks):
    assert ranks.run(2, without_rows) == [(0.0, (0, 5))] * 2


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_without_a_group_it_is_torch(smoothing, z_loss):
    from shardyard.ops.vocabulary import LossTerms, cross_entropy_sum, gather_vocabulary

    logits, targets = logits_and_targets(torch.float64)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    expected = expected + z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()
    ours = cross_entropy_sum(logits, targets, None, LossTerms(z_loss, smoothing))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(0.5 * loss, logits)[0] for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert gather_vocabulary(logits, None) is logits


def backward_twice() -> str:
    import torch.distributed as dist

    from shardyard.ops.vocabulary import cross_entropy_sum

    logits, targets = logits_and_targets(torch.float32)
    mine = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    loss = cross_entropy_sum(mine, targets, dist.group.WORLD)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_backward_is_an_error_not_a_wrong_number(ranks):
    assert all("modified by an inplace operation" in text for text in ranks.run(2, backward_twice))


def counted() -> tuple[dict[str, int], dict[str, int]]:
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    from shardyard.ops.vocabulary import cross_entropy_sum

    logits, targets = logits_and_targets(torch.float32)
    mine = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    with CommDebugMode() as forward:
        loss = cross_entropy_sum(mine, targets, dist.group.WORLD)
    with CommDebugMode() as backward:
        loss.backward()
    return _names(forward), _names(backward)


def _names(mode: Any) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


def test_two_all_reduces_forward_and_nothing_backward(ranks):
    for forward, backward in ranks.run(2, counted):
        assert sum(forward.values()) == 2 and all("allreduce" in name for name in forward), forward
        assert backward == {}


def gathered() -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    from shardyard.ops.vocabulary import gather_vocabulary

    logits = logits_and_targets(torch.float32)[0][None]
    mine = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    whole = gather_vocabulary(mine, dist.group.WORLD)
    (whole * torch.arange(WORDS)).sum().backward()
    assert mine.grad is not None
    return whole.detach(), mine.grad


def test_gathered_logits_are_whole_and_each_rank_keeps_the_gradient_of_its_words(ranks):
    logits, _ = logits_and_targets(torch.float32)
    results = ranks.run(4, gathered)
    for whole, _ in results:
        assert torch.equal(whole, logits[None])
    expected = torch.arange(WORDS).float().expand(1, ROWS, WORDS)
    assert torch.equal(torch.cat([grad for _, grad in results], -1), expected)
