"""The learning rate of every update, against the formulas of the documentation worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, get_args

import pytest

from shardyard.config import TrainingConfig
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
    of_ratio = Schedule.of(TrainingConfig(output_dir="x", warmup_ratio=0.3, lr=1.0), 9)
    assert of_ratio.warmup == 2  # 0.3 x 9 = 2.7
    exact = ((100, 0.29, 29), (50, 0.58, 29), (1000, 0.001, 1), (10, 0.1999, 1))
    for total, ratio, wanted in exact:
        training = TrainingConfig(output_dir="x", warmup_ratio=ratio, lr_wsd_decay_ratio=ratio)
        of_both = Schedule.of(training, total)
        assert (of_both.warmup, of_both.decay) == (wanted, wanted)
    of_steps = Schedule.of(TrainingConfig(output_dir="x", warmup_steps=5, lr=1.0), 9)
    assert of_steps.warmup == 5


def test_wsd_is_flat_and_falls_at_the_end_in_each_style():
    """2 warm-up updates, the last 4 of 12 fall from 1 to 0.2: by quarters of the way."""
    fallen: dict[Any, list[float]] = {
        "linear": [0.25, 0.5, 0.75, 1.0],
        "cosine": [(1 - math.cos(math.pi * q)) / 2 for q in (0.25, 0.5, 0.75, 1.0)],
        "minus_sqrt": [0.5, math.sqrt(0.5), math.sqrt(0.75), 1.0],
        "exponential": [2 - 2 ** (1 - q) for q in (0.25, 0.5, 0.75, 1.0)],
    }
    for style, shares in fallen.items():
        schedule = Schedule("wsd", 1.0, 0.2, 2, 12, decay=4, style=style)
        assert [schedule.lr_at(k) for k in range(1, 9)] == [0.5] + [1.0] * 7
        assert [schedule.lr_at(k) for k in range(9, 13)] == pytest.approx([1 - 0.8 * s for s in shares])


def test_wsd_whose_fall_is_longer_than_what_warmup_leaves_falls_all_along():
    schedule = Schedule("wsd", 1.0, 0.0, 2, 6, decay=100)
    assert [schedule.lr_at(k) for k in range(1, 7)] == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_restarts_go_back_to_the_full_rate_and_end_at_min_lr():
    """Three cycles of 4 updates from update 1 on, each by quarters of the cosine's way."""
    schedule = Schedule("cosine_with_restarts", 1.0, 0.2, 0, 13, cycles=3)
    cycle = [0.2 + 0.8 * (1 + math.cos(math.pi * q)) / 2 for q in (0.0, 0.25, 0.5, 0.75)]
    assert [schedule.lr_at(k) for k in range(1, 14)] == pytest.approx([*cycle * 3, 0.2])


@pytest.mark.parametrize("cycles", [1, 3, 7, 22, 29])
def test_every_cycle_begins_at_the_full_rate(cycles: int) -> None:
    """22 cycles of 2 updates: 30 / 44 x 22 is 14.999999999999998 in floating point."""
    schedule = Schedule("cosine_with_restarts", 1.0, 0.0, 0, 2 * cycles + 1, cycles=cycles)
    rates = [schedule.lr_at(1 + k) for k in range(2 * cycles + 1)]
    assert rates[:-1:2] == [1.0] * cycles
    assert rates[1::2] == pytest.approx([0.5] * cycles) and rates[-1] == pytest.approx(0.0)


def test_one_cycle_is_cosine_and_power_one_is_linear():
    for k in range(1, 21):
        cosine, linear = (Schedule(kind, 3.0, 0.5, 4, 20) for kind in ("cosine", "linear"))
        assert Schedule("cosine_with_restarts", 3.0, 0.5, 4, 20).lr_at(k) == pytest.approx(cosine.lr_at(k))
        assert Schedule("polynomial", 3.0, 0.5, 4, 20).lr_at(k) == pytest.approx(linear.lr_at(k))


def test_polynomial_is_a_power_of_what_is_left():
    # Half, then a quarter of the way left of 8 updates after the first: squares of them.
    schedule = Schedule("polynomial", 1.0, 0.2, 0, 9, power=2.0)
    assert schedule.lr_at(5) == pytest.approx(0.2 + 0.8 * 0.25)
    assert schedule.lr_at(7) == pytest.approx(0.2 + 0.8 * 0.0625)
    assert schedule.lr_at(9) == pytest.approx(0.2)


def test_inverse_sqrt_falls_by_the_root_of_the_update_and_not_below_min_lr():
    schedule = Schedule("inverse_sqrt", 1.0, 0.25, 4, 1000)
    assert [schedule.lr_at(k) for k in (2, 4, 16, 36, 64, 400)] == pytest.approx(
        [0.5, 1.0, 0.5, 1 / 3, 0.25, 0.25]
    )
    without = Schedule("inverse_sqrt", 1.0, 0.0, 0, 10**6)
    assert without.lr_at(1) == 1.0
    assert without.lr_at(30_001) == pytest.approx(0.5)  # 10,000 / (10,000 + 30,000)


NAMES = get_args(TrainingConfig.model_fields["lr_scheduler_type"].annotation)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_works_with_its_defaults_and_three_updates(name: Any) -> None:
    training = TrainingConfig(output_dir="x", lr_scheduler_type=name, lr=1e-3, min_lr=1e-4)
    schedule = Schedule.of(training, 3)
    rates = [schedule.lr_at(k) for k in (1, 2, 3)]
    assert rates[0] == pytest.approx(1e-3) and rates == sorted(rates, reverse=True)
    if schedule.kind not in ("constant", "inverse_sqrt"):
        assert rates[2] == pytest.approx(1e-4)
    assert Schedule(**asdict(schedule)) == schedule


def test_other_names_mean_the_same():
    names: Any = (
        ("constant_with_warmup", "constant"),
        ("warmup_stable_decay", "wsd"),
        ("cosine_with_min_lr", "cosine"),
    )
    for other, name in names:
        of_both = [
            Schedule.of(TrainingConfig(output_dir="x", lr_scheduler_type=n, lr=1e-3), 50)
            for n in (other, name)
        ]
        assert of_both[0] == of_both[1]


def test_a_schedule_of_an_older_checkpoint_is_read():
    old = {"kind": "linear", "lr": 1.0, "min_lr": 0.0, "warmup": 0, "total": 3}
    assert Schedule(**old).lr_at(2) == 0.5
