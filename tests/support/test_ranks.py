"""The pool that everybody's distributed tests stand on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, RankPool


def rank_sum() -> tuple[int, int, float]:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return dist.get_rank(), int(os.environ["WORLD_SIZE"]), value.item()


def double(tensor: torch.Tensor, *, factor: int) -> torch.Tensor:
    return tensor * factor


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("weights of rank one")
    dist.barrier()


def kill_rank_zero() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_long() -> None:
    time.sleep(60)


def group_exists() -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_runs_in_one_group(ranks: RankPool, world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert ranks.run(world_size, rank_sum) == [(rank, world_size, total) for rank in range(world_size)]


def test_arguments_and_tensors_travel_by_value(ranks: RankPool) -> None:
    for result in ranks.run(2, double, torch.arange(3), factor=2):
        assert torch.equal(result, torch.tensor([0, 2, 4]))


def test_a_raising_rank_is_named_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1") as caught:
        ranks.run(2, raise_on_rank_one)
    assert "raise_on_rank_one" in str(caught.value)
    assert isinstance(caught.value.causes[1], KeyError)


def test_a_killed_rank_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0: ended without an answer, exit code -9"):
        ranks.run(2, kill_rank_zero)


def test_a_hung_rank_ends_at_the_time_limit_and_the_pool_lives_on(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="no answer"):
        ranks.run(2, sleep_long, timeout_s=1.5)
    assert time.monotonic() - start < 10
    assert ranks.run(1, group_exists) == [True]


def test_a_test_may_make_its_own_group(ranks: RankPool) -> None:
    assert ranks.run(2, group_exists, init_process_group=False) == [False, False]
