"""Muon, and the other optimizers that are no AdamW: five updates on every layout end with the weights of one
process, also after a resume on another layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity import write_parity_model
from support.training import (
    Outcome,
    Recipe,
    build_step,
    largest_relative_difference,
    make_rows,
    micro_batches_of,
    train_rows,
    whole_model,
)

TOLERANCE = 1e-5
ALONE = {"fsdp_size": 1}
SOAK = pytest.mark.soak


def training_of(optimizer: str) -> dict[str, Any]:
    """Muon moves the whole matrix at each step: a tenth of the rate that the recipes of AdamW have. A decay
    that is seen, and a group of its own.
    """
    slower = 0.1 if optimizer in ("muon", "lion") else 1.0
    return {
        "optimizer": optimizer, "adam_epsilon": 1e-4, "max_grad_norm": 0.5, "weight_decay": 0.5,
        "parameter_groups": (
            {"patterns": ["model.layers.{0-1}.*"], "lr_scale": slower / 2},
            {"patterns": ["*"], "lr_scale": slower},
        ),
    }  # fmt: skip


COLUMNS = {"cpu_offload": True, "shard_placement_fn": "shard_by_dim_1"}


def _layout(
    name: str, family: str, world: int, *, soak: bool = False, accumulation: int = 1, **parallel: Any
):
    marks = [SOAK] if soak else []
    return pytest.param(family, world, accumulation, parallel, id=name, marks=marks)


LAYOUTS = [
    _layout("FSDP 2", "dense", 2, soak=True),
    _layout("FSDP 4", "dense", 4, soak=True),
    _layout("HSDP 2x2", "dense", 4, soak=True, fsdp_size=2),
    _layout("replicas of 2", "dense", 2, soak=True, fsdp_size=1),
    _layout("TP 2 x FSDP 2, recomputed", "dense", 4, accumulation=2, recompute=True, tp_size=2),
    _layout("TP 4", "dense", 4, soak=True, tp_size=4),
    _layout("CP 2", "dense", 2, soak=True, cp_size=2),
    _layout("PP 2 x FSDP 2", "dense", 4, soak=True, accumulation=2, pp_size=2),
    _layout("columns of 2, on the host", "dense", 2, soak=True, **COLUMNS),
    _layout("ignored modules", "dense", 2, soak=True, ignored_modules=["model.layers.{*}.self_attn"]),
    _layout("EP 2", "moe", 2, soak=True, ep_size=2),
    _layout("EP 2 x EFSDP 2 on FSDP 4", "moe", 4, soak=True, ep_size=2),
    _layout("EP 2 on HSDP 2x2", "moe", 4, soak=True, fsdp_size=2, ep_size=2),
    _layout("TP 2 with EP 2", "moe", 2, soak=True, tp_size=2, ep_size=2),
    _layout("FSDP 2", "moe", 2, soak=True),
    _layout("PP 2 with EP 2 on FSDP 2", "moe", 4, accumulation=2, pp_size=2, ep_size=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("muon")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def one_process(ranks: Any, folders: dict[str, Path]):
    """(optimizer, family) -> the outcome of one process with one micro-batch."""
    known: dict[tuple[str, str], Outcome] = {}

    def outcome(optimizer: str, family: str) -> Outcome:
        if (optimizer, family) not in known:
            recipe = Recipe(training=training_of(optimizer))
            known[optimizer, family] = ranks.run(1, train_rows, folders[family], make_rows(), recipe)[0]
        return known[optimizer, family]

    return outcome


def assert_same(ours: Outcome, wanted: Outcome, optimizer: str) -> None:
    assert ours.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(wanted.norms, rel=TOLERANCE)
    if optimizer != "lion":  # a sign of what is rounding alone moves an element by the rate, either way
        assert largest_relative_difference(ours.weights, wanted.weights) <= TOLERANCE


@pytest.mark.parametrize(("family", "world", "accumulation", "parallel"), LAYOUTS)
def test_muon_gives_the_weights_of_one_process(
    ranks, folders, one_process, family, world, accumulation, parallel
):
    recipe = Recipe(accumulation=accumulation, parallel=parallel, training=training_of("muon"))
    outcome = ranks.run(world, train_rows, folders[family], make_rows(), recipe)[0]
    assert_same(outcome, one_process("muon", family), "muon")


@pytest.mark.parametrize("optimizer", ["adam_mini", pytest.param("lion", marks=SOAK)])
@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        pytest.param("dense", 2, {"tp_size": 2}, id="TP 2"),
        pytest.param("dense", 4, {"tp_size": 2}, id="TP 2 x FSDP 2", marks=SOAK),
        pytest.param("moe", 4, {"ep_size": 2, "fsdp_size": 2}, id="EP 2 on HSDP 2x2", marks=SOAK),
        pytest.param("moe", 4, {"pp_size": 2}, id="PP 2 x FSDP 2", marks=SOAK),
    ],
)
def test_others_give_the_weights_of_one_process(
    ranks, folders, one_process, optimizer, family, world, parallel
):
    accumulation = parallel.get("pp_size", 1)
    recipe = Recipe(accumulation=accumulation, parallel=parallel, training=training_of(optimizer))
    outcome = ranks.run(world, train_rows, folders[family], make_rows(), recipe)[0]
    assert_same(outcome, one_process(optimizer, family), optimizer)


def part_of_a_run(folder, parallel, training, out, first, last):
    """Steps ``first`` to ``last``, from the checkpoint of the step before; saves at the end."""
    from shardyard.checkpoint import CheckpointStore

    stages = parallel.get("pp_size", 1)
    built, step, meshes = build_step(folder, Recipe(parallel=parallel, training=training))
    store = CheckpointStore(Path(out), save_total_limit=None)
    if first > 1:
        path = store.folder / f"global_step_{first - 1}"
        store.load(path, model=built.model, optimizer=step.optimizer)
    batches = micro_batches_of(make_rows(), stages, meshes.dp_rank, meshes.dp_size)
    results = [step(batches, step=number, lr=1e-2) for number in range(first, last + 1)]
    store.save(last, model=built.model, optimizer=step.optimizer, run_state={})
    weights = whole_model(dict(built.model.named_parameters()))
    return [r.loss for r in results], weights


RESUMES = [
    pytest.param("muon", 2, {"tp_size": 2}, 2, {"ep_size": 2}, id="muon, TP 2 to EP 2"),
    pytest.param("muon", 2, {"tp_size": 2}, 4, {"ep_size": 2}, id="muon, TP 2 to EP 2 x EFSDP 2", marks=SOAK),
    pytest.param("muon", 4, {"pp_size": 2, "ep_size": 2}, 1, ALONE, id="muon, PP 2 x EP 2 to 1", marks=SOAK),
    pytest.param("muon", 1, ALONE, 4, {"fsdp_size": 2}, id="muon, one process to HSDP 2x2", marks=SOAK),
    pytest.param("adam_mini", 4, {"tp_size": 2, "ep_size": 2}, 2, {}, id="adam_mini, TP 2 with EP 2 to FSDP",
                 marks=SOAK),
    pytest.param("lion", 2, {}, 1, ALONE, id="lion, FSDP 2 to one process", marks=SOAK),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "before", "layout_before", "after", "layout_after"), RESUMES)
def test_a_run_goes_on_on_another_layout(
    ranks, folders, one_process, tmp_path, optimizer, before, layout_before, after, layout_after
):
    unbroken, training = one_process(optimizer, "moe"), training_of(optimizer)
    folder = folders["moe"]
    ranks.run(before, part_of_a_run, folder, layout_before, training, str(tmp_path), 1, 2)
    losses, weights = ranks.run(after, part_of_a_run, folder, layout_after, training, str(tmp_path), 3, 5)[0]
    assert losses == pytest.approx(unbroken.losses[2:], rel=TOLERANCE)
    if optimizer != "lion":
        assert largest_relative_difference(weights, unbroken.weights) <= TOLERANCE


def resume_under_another(folder, out):
    """Save with Muon, and go on with AdamW; what that is refused with."""
    from shardyard.checkpoint import CheckpointStore
    from shardyard.config import TrainingConfig
    from shardyard.errors import UserError
    from shardyard.optim import build_optimizer

    built, step, meshes = build_step(folder, Recipe(training={"optimizer": "muon"}))
    store = CheckpointStore(Path(out), save_total_limit=None)
    store.save(1, model=built.model, optimizer=step.optimizer, run_state={})
    adamw = build_optimizer(built.model, TrainingConfig(output_dir="unused"), meshes)
    try:
        store.load(store.folder / "global_step_1", model=built.model, optimizer=adamw)
    except UserError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_optimizer_is_refused(ranks, folders, tmp_path):
    (refusal,) = ranks.run(1, resume_under_another, folders["dense"], str(tmp_path))
    assert "training.optimizer and what model.freeze leaves to train have to be the same" in refusal
