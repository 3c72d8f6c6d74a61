"""Gathering and scattering a sequence: values, gradients, any batch, and no views."""

from __future__ import annotations

import pytest
import torch


def both(batch: int) -> dict[str, torch.Tensor]:
    """What `gather_sequence` and `scatter_sequence` make of numbers that tell rank and place."""
    import torch.distributed as dist

    from shardyard.parallel.tensor import gather_sequence, scatter_sequence

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    part = whole_of(batch).chunk(dist.get_world_size(), 1)[rank].clone().requires_grad_()
    whole = gather_sequence(part, group)
    (whole * (rank + 1)).sum().backward()
    partial = (whole_of(batch) * (rank + 1)).requires_grad_()
    mine = scatter_sequence(partial, group)
    (mine * (rank + 1)).sum().backward()
    assert part.grad is not None and partial.grad is not None
    assert not whole._is_view() and not mine._is_view()
    assert whole.is_contiguous() and mine.is_contiguous()
    return dict(
        gathered=whole.detach(), gathered_grad=part.grad, scattered=mine.detach(), scattered_grad=partial.grad
    )


def whole_of(batch: int) -> torch.Tensor:
    return torch.arange(batch * 6 * 2, dtype=torch.float32).view(batch, 6, 2)


@pytest.mark.parametrize("batch", [1, 3])
def test_gather_and_scatter_are_each_others_backward(batch, ranks):
    whole = whole_of(batch)
    results = ranks.run(3, both, batch)
    weights = 1 + 2 + 3
    for rank, result in enumerate(results):
        assert torch.equal(result["gathered"], whole)
        # Every rank used the whole, weighted by its number: a token's gradient is the sum of all.
        assert torch.equal(result["gathered_grad"], torch.full((batch, 2, 2), float(weights)))
        assert torch.equal(result["scattered"], weights * whole.chunk(3, 1)[rank])
        expected = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(2)[None, :, None].expand(batch, 6, 2)
        assert torch.equal(result["scattered_grad"], expected)


def uneven() -> str:
    import torch.distributed as dist

    from shardyard.parallel.tensor import scatter_sequence

    assert dist.group.WORLD is not None
    try:
        scatter_sequence(torch.zeros(1, 5, 2), dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "no error"


def test_tokens_that_do_not_divide_are_refused(ranks):
    assert ranks.run(2, uneven) == ["5 tokens do not divide over 2 tensor parallel ranks"] * 2
