"""The learning rate of every update, against the formulas of the documentation worked out by hand."""

from __future__ import annotations

import math

import pytest

from shardyard.optim import Schedule


def test_warmup_rises_in_equal_parts_to_the_full_rate():
    schedule = Schedule("cosine", lr=8.0, min_lr=0.0, warmup=4, total=10)
    assert [schedule.lr_at(k) for k in (1, 2, 3, 4)] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_last_update_reaches_min_lr_exactly(kind, warmup):
    assert Schedule(kind, 1.0, 0.25, warmup, 20).lr_at(20) == pytest.approx(0.25, abs=1e-15)


def test_cosine_and_linear_are_half_way_in_the_middle():
    # 2 warm-up updates of 12: update 7 is half of the way from update 2 to update 12.
    assert Schedule("cosine", 1.0, 0.2, 2, 12).lr_at(7) == pytest.approx(0.6)
    assert Schedule("linear", 1.0, 0.2, 2, 12).lr_at(7) == pytest.approx(0.6)
    # A quarter of the way (update 4.5 is none, so 8 of 32): (1 + cos(pi/4)) / 2.
    assert Schedule("cosine", 1.0, 0.0, 1, 33).lr_at(9) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_without_warmup_the_first_update_has_the_full_rate():
    for kind in ("cosine", "linear", "constant"):
        assert Schedule(kind, 3.0, 0.0, 0, 5).lr_at(1) == 3.0


def test_constant_stays_after_the_warmup():
    schedule = Schedule("constant", 3.0, 1.0, 2, 9)
    assert [schedule.lr_at(k) for k in (1, 2, 3, 9)] == [1.5, 3.0, 3.0, 3.0]


def test_runs_of_one_update_and_all_warmup_are_finite():
    assert Schedule("cosine", 1.0, 0.1, 0, 1).lr_at(1) == 1.0
    assert Schedule("linear", 1.0, 0.1, 5, 5).lr_at(5) == 1.0


def test_warmup_ratio_rounds_down_and_steps_win_over_it():
    from shardyard.config import TrainingConfig

    of_ratio = Schedule.of(TrainingConfig(output_dir="x", warmup_ratio=0.3, lr=1.0), 9)
    assert of_ratio.warmup == 2  # 0.3 x 9 = 2.7
    of_steps = Schedule.of(TrainingConfig(output_dir="x", warmup_steps=5, lr=1.0), 9)
    assert of_steps.warmup == 5
