"""Invariant: a run saved on one layout goes on, on another, as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.parity import write_parity_model
from support.training import (
    Recipe,
    build_step,
    largest_relative_difference,
    make_rows,
    micro_batches_of,
    train_rows,
    whole_model,
)

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 0.5}
ALONE = {"fsdp_size": 1}
# Three ranks cannot share four experts.
WHOLE_EXPERTS = {"ignored_modules": ["model.layers.{*}.mlp.experts"]}

PAIRS = [
    pytest.param(2, {"tp_size": 2}, 4, {"fsdp_size": 2}, id="TP 2 to HSDP 2x2"),
    pytest.param(4, {"tp_size": 2, "ep_size": 2}, 2, {}, id="TP 2 x FSDP 2 with EP 2 to FSDP 2"),
    pytest.param(4, {"ep_size": 2}, 2, {"tp_size": 2, "ep_size": 2}, id="EP 2 x EFSDP 2 to TP 2 with EP 2"),
    pytest.param(4, {"pp_size": 2, "ep_size": 2}, 1, ALONE, id="PP 2 with EP 2 to one process"),
    pytest.param(1, ALONE, 4, {"pp_size": 2, "tp_size": 2}, id="one process to PP 2 x TP 2"),
    pytest.param(2, {"cp_size": 2}, 3, WHOLE_EXPERTS, id="CP 2 to FSDP 3 with whole experts"),
]  # fmt: skip
SAMPLE = {"TP 2 to HSDP 2x2", "EP 2 x EFSDP 2 to TP 2 with EP 2", "PP 2 with EP 2 to one process"}
for index, pair in enumerate(PAIRS):
    if pair.id not in SAMPLE:
        PAIRS[index] = pytest.param(*pair.values, id=pair.id, marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parity_model(tmp_path_factory.mktemp("layouts") / "moe", "moe")


def part_of_a_run(folder, parallel, out, first, last):
    """Steps ``first`` to ``last`` of a run, from the checkpoint of the step before; saves at the end."""
    from shardyard.checkpoint import CheckpointStore

    stages = parallel.get("pp_size", 1)
    built, step, meshes = build_step(folder, Recipe(parallel=parallel, training=TRAINING))
    store = CheckpointStore(Path(out), save_total_limit=None)
    if first > 1:
        path = store.folder / f"global_step_{first - 1}"
        store.load(path, model=built.model, optimizer=step.optimizer)
    batches = micro_batches_of(make_rows(), stages, meshes.dp_rank, meshes.dp_size)
    results = [step(batches, step=number, lr=1e-2) for number in range(first, last + 1)]
    store.save(last, model=built.model, optimizer=step.optimizer, run_state={})
    return (
        [r.loss for r in results],
        [r.grad_norm for r in results],
        whole_model(dict(built.model.named_parameters())),
    )


@pytest.mark.parametrize(("before", "layout_before", "after", "layout_after"), PAIRS)
def test_a_run_goes_on_on_another_layout(ranks, folder, tmp_path, before, layout_before, after, layout_after):
    unbroken = ranks.run(1, train_rows, folder, make_rows(), Recipe(training=TRAINING, steps=4))[0]
    ranks.run(before, part_of_a_run, folder, layout_before, str(tmp_path), 1, 2)
    losses, norms, weights = ranks.run(after, part_of_a_run, folder, layout_after, str(tmp_path), 3, 4)[0]
    assert losses == pytest.approx(unbroken.losses[2:], rel=1e-5)
    assert norms == pytest.approx(unbroken.norms[2:], rel=1e-5)
    assert largest_relative_difference(weights, unbroken.weights) <= 1e-5
