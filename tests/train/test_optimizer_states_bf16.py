"""Runs with AdamW's moments in bf16: on any layout, resumed, beside runs with moments in fp32."""

from __future__ import annotations

import numpy as np
import pytest
from support.optimizer_states import Leg, leg_of_a_run
from support.parity import write_parity_model
from support.training import Recipe

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 0.5, "optimizer_state_dtype": "bf16"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_parity_model(tmp_path_factory.mktemp("states") / "dense", "dense")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_parity_model(tmp_path_factory.mktemp("states") / "moe", "moe")


def recipe(**parallel: object) -> Recipe:
    return Recipe(parallel=dict(parallel), training=TRAINING)


def run(ranks, folder, out, world=1, first=1, last=4, **parallel) -> Leg:
    return ranks.run(world, leg_of_a_run, folder, recipe(**parallel), out, first, last)[0]


def assert_same_but_for_a_few_roundings(ours: Leg, reference: Leg) -> None:
    """A moment that differs in its last bits of fp32 is rounded to the other neighbour once in about 2^15
    times; then that element moves by up to 1/128 of a step (0.01) more or less in each later update.
    """
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    apart, total = 0, 0
    for name, weights in reference.weights.items():
        difference = np.abs(ours.weights[name] - weights)
        assert difference.max() <= 4 * 0.01 / 32, name
        apart, total = apart + int((difference > 1e-5).sum()), total + difference.size
    assert apart <= total / 200


LAYOUTS = [
    pytest.param("dense", 2, {"tp_size": 2}, id="TP 2"),
    pytest.param("dense", 4, {"fsdp_size": 2, "ignored_modules": ["model.norm"]}, id="HSDP 2x2",
                 marks=pytest.mark.soak),
    pytest.param("dense", 2, {"pp_size": 2}, id="PP 2 of a tied model"),
    pytest.param("dense", 2, {"cpu_offload": True}, id="offloaded", marks=pytest.mark.soak),
    pytest.param("moe", 4, {"ep_size": 2}, id="EP 2 x EFSDP 2 on FSDP 4"),
    pytest.param("moe", 2, {"shard_placement_fn": "shard_by_dim_1"}, id="columns", marks=pytest.mark.soak),
]  # fmt: skip


@pytest.mark.parametrize(("family", "world", "parallel"), LAYOUTS)
def test_a_layout_changes_nothing_but_roundings(ranks, request, tmp_path, family, world, parallel):
    folder = request.getfixturevalue(family)
    alone = run(ranks, folder, tmp_path / "alone")
    assert_same_but_for_a_few_roundings(run(ranks, folder, tmp_path / "ours", world, **parallel), alone)


def test_a_resumed_run_is_bit_for_bit_the_unbroken_one_and_goes_on_elsewhere(ranks, dense, tmp_path):
    unbroken = run(ranks, dense, tmp_path / "whole", 2)
    run(ranks, dense, tmp_path / "broken", 2, last=2)
    resumed = run(ranks, dense, tmp_path / "broken", 2, first=3)
    assert resumed.losses == unbroken.losses[2:]
    assert all(np.array_equal(resumed.weights[name], w) for name, w in unbroken.weights.items())
    elsewhere = run(ranks, dense, tmp_path / "broken", 1, first=3)
    assert elsewhere.losses == pytest.approx(unbroken.losses[2:], rel=1e-5)


def test_twenty_steps_lose_as_with_moments_in_fp32_and_keep_half_the_bytes(ranks, dense, tmp_path):
    in_fp32 = Recipe(training=TRAINING | {"optimizer_state_dtype": "fp32"})
    reference = ranks.run(1, leg_of_a_run, dense, in_fp32, tmp_path / "fp32", 1, 20)[0]
    ours = run(ranks, dense, tmp_path / "bf16", last=20)
    assert reference.losses[-1] < reference.losses[0] - 1, "it learns"
    assert ours.losses == pytest.approx(reference.losses, rel=2e-3)
    assert 2 * ours.state_bytes == reference.state_bytes
