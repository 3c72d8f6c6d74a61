"""Runs with AdamW's moments in bf16: on any layout, resumed, beside runs with moments in fp32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.optimizer_states import TIMEOUT_S, Leg, leg_of_a_run, unbroken_and_resumed
from support.parity import write_parity_model
from support.training import Recipe
from support.whole_runs import metrics, train, write_numbered, write_workspace

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 0.5, "optimizer_state_dtype": "bf16"}


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """family -> (its folder, four steps of it on one rank)."""
    found = {}

    def of(family: str):
        if family not in found:
            folder = write_parity_model(tmp_path_factory.mktemp("states") / family, family)
            recipe = Recipe(training=TRAINING)
            found[family] = folder, ranks.run(1, leg_of_a_run, folder, recipe, folder / "alone", 1, 4)[0]
        return found[family]

    return of


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
    pytest.param("dense", 2, {"tp_size": 2}, id="TP 2", marks=pytest.mark.soak),
    pytest.param("dense", 2, {"pp_size": 2}, id="PP 2 of a tied model"),
    pytest.param("dense", 4, {"fsdp_size": 2, "ignored_modules": ["model.norm"]}, id="HSDP 2x2",
                 marks=pytest.mark.soak),
    pytest.param("dense", 2, {"cpu_offload": True}, id="offloaded", marks=pytest.mark.soak),
    pytest.param("moe", 4, {"ep_size": 2}, id="EP 2 x EFSDP 2 on FSDP 4", marks=pytest.mark.soak),
    pytest.param("moe", 2, {"shard_placement_fn": "shard_by_dim_1"}, id="columns", marks=pytest.mark.soak),
]  # fmt: skip


@pytest.mark.parametrize(("family", "world", "parallel"), LAYOUTS)
def test_a_layout_changes_nothing_but_roundings(ranks, alone, tmp_path, family, world, parallel):
    folder, reference = alone(family)
    recipe = Recipe(parallel=parallel, training=TRAINING)
    ours = ranks.run(world, leg_of_a_run, folder, recipe, tmp_path, 1, 4)[0]
    assert_same_but_for_a_few_roundings(ours, reference)


def legs_elsewhere(folder, recipe, out):
    """Two steps from what another layout saved, and twenty from the start with moments in bf16 and fp32."""
    in_fp32 = replace(recipe, training=recipe.training | {"optimizer_state_dtype": "fp32"})
    resumed = leg_of_a_run(folder, recipe, out / "broken", 3, 4)
    twenty = [leg_of_a_run(folder, each, out / str(n), 1, 20) for n, each in enumerate((recipe, in_fp32))]
    return resumed, *twenty


def test_a_resumed_run_is_bit_for_bit_the_unbroken_one_and_learns_as_with_fp32(ranks, alone, tmp_path):
    folder, _ = alone("dense")
    recipe = Recipe(training=TRAINING)
    unbroken, resumed = ranks.run(2, unbroken_and_resumed, folder, recipe, tmp_path, timeout_s=TIMEOUT_S)[0]
    assert resumed.losses == unbroken.losses[2:]
    assert all(np.array_equal(resumed.weights[name], w) for name, w in unbroken.weights.items())
    elsewhere, in_bf16, in_fp32 = ranks.run(1, legs_elsewhere, folder, recipe, tmp_path, timeout_s=TIMEOUT_S)[
        0
    ]
    assert elsewhere.losses == pytest.approx(unbroken.losses[2:], rel=1e-5)
    assert in_fp32.losses[-1] < in_fp32.losses[0] - 1, "it learns"
    assert in_bf16.losses == pytest.approx(in_fp32.losses, rel=2e-3)
    assert 2 * in_bf16.state_bytes == in_fp32.state_bytes


def test_a_whole_run_that_steps_in_the_backward_has_the_numbers_of_an_ordinary_one(ranks, tmp_path):
    folder = write_workspace(tmp_path)
    write_numbered(folder / "rows.jsonl", range(6))
    words = ("--training.max_steps", "3", "--training.save_steps", "0", "--training.max_grad_norm", "0.1",
             "--training.optimizer_state_dtype", "bf16")  # fmt: skip
    found = []
    for out, more in (("ordinary", ()), ("ours", ("--training.optimizer_in_backward", "two_pass"))):
        train(ranks, folder, out, *words, *more, world=2)
        found.append([(row["loss"], row["grad_norm"]) for row in metrics(folder, out) if "loss" in row])
    assert found[0] == found[1] and len(found[0]) == 3
    assert min(norm for _, norm in found[0]) > 0.1, "it clips"
