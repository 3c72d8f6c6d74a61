"""The scale of fp16's loss moves as torch's GradScaler moves its own."""

from __future__ import annotations

import random

import pytest
import torch
from support.configs import load

from shardyard.config import ParallelConfig, TrainingConfig
from shardyard.errors import UserError
from shardyard.train.scaler import LossScaler, ScaleState
from shardyard.train.state import RunState


@pytest.mark.parametrize(
    ("initial", "interval", "growth", "backoff"),
    [(65536.0, 3, 2.0, 0.5), (1000.0, 2, 1.7, 0.3), (2.0**126, 1, 4.0, 0.5), (65536.0, 4, 1.5, 0.9)],
)
def test_the_scale_is_that_of_grad_scaler(initial, interval, growth, backoff):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    ours = LossScaler(
        initial, growth_interval=interval, growth_factor=growth, backoff_factor=backoff, minimum=1e-30
    )
    draw, overflows = random.Random(interval), 0
    for _ in range(60):
        overflow = draw.random() < 0.25
        overflows += overflow
        theirs.scale(weight.sum())  # as a training loop does first; it makes the scale's tensor
        weight.grad = torch.full((3,), float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        if overflow:
            ours.back_off()
        else:
            ours.succeeded()
        assert (ours.scale, ours.state.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
    assert ours.state.overflows == overflows > 5


def test_the_scale_stops_at_its_minimum():
    scaler = LossScaler(8.0, minimum=3.0)
    seen = []
    while scaler.can_back_off:
        scaler.back_off()
        seen.append(scaler.scale)
    assert seen == [4.0, 3.0]


def test_a_run_that_goes_on_takes_its_scale_along():
    training = TrainingConfig(output_dir="x", fp16_initial_scale=64.0)
    assert LossScaler.of(training, ParallelConfig()) is None
    fresh = LossScaler.of(training, ParallelConfig(param_dtype="fp16"), RunState("order").scale)
    assert fresh is not None and fresh.state == ScaleState(64.0)
    fresh.succeeded()
    fresh.back_off()
    fresh.succeeded()
    saved = RunState("order").scaled(fresh.state).to_json()
    again = LossScaler.of(training, ParallelConfig(param_dtype="fp16"), RunState.from_json(saved).scale)
    assert again is not None and again.state == fresh.state == ScaleState(32.0, 1, 1)


def test_a_run_that_goes_on_with_a_shorter_interval_grows_at_the_next_good_step():
    parallel, training = ParallelConfig(param_dtype="fp16"), TrainingConfig(output_dir="x")
    state = ScaleState(8.0, good_steps=1500)
    shorter = LossScaler.of(training.model_copy(update={"fp16_growth_interval": 1000}), parallel, state)
    assert shorter is not None and shorter.succeeded() == ScaleState(16.0)


def test_a_run_that_goes_on_in_another_precision_tells_no_scale():
    state = RunState("order", step=3).scaled(ScaleState(8.0, 2, 1)).scaled(None)
    assert state.scale is None and (state.step, state.overflows) == (3, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parallel: {reduce_dtype: fp16}", "reduce_dtype: fp16 needs parallel.param_dtype: fp16"),
        ("parallel: {reduce_dtype: fp16, param_dtype: bf16}", "reduce_dtype: fp16 needs"),
        (
            "parallel: {param_dtype: fp16}\ntraining: {fp16_min_scale: 4, fp16_initial_scale: 2}",
            "fp16_min_scale: is above training.fp16_initial_scale",
        ),
        ("training: {fp16_backoff_factor: 1.0}", "fp16_backoff_factor"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, told):
    with pytest.raises(UserError, match=told):
        load(tmp_path, text)


def test_settings_without_fp16_are_told(tmp_path):
    loaded = load(tmp_path, "training: {fp16_growth_interval: 10}")
    assert any("fp16_growth_interval: has no effect while parallel.param_dtype" in w for w in loaded.warnings)
