"""Whole steps of models with experts: balance, biases and load in several layouts, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import write_tiny_model
from support.ranks import RankPool
from support.training import (
    Recipe,
    build_step,
    largest_relative_difference,
    make_rows,
    micro_batches_of,
    whole,
)

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
VOCAB_SIZE = 200  # divides by tp
STEPS = 3
TRAINING = {
    "router_aux_loss_coef": 0.05, "router_bias_update_rate": 0.03125,
    "adam_epsilon": 3e-4, "max_grad_norm": 1e9,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("routers")
    return {family: write_tiny_model(root / family, family, vocab_size=VOCAB_SIZE) for family in FAMILIES}


def recipe_of(family: str, accumulation: int, **parallel: Any) -> Recipe:
    has_bias = family in ("deepseek_v3", "glm4_moe")
    training = {k: v for k, v in TRAINING.items() if has_bias or k != "router_bias_update_rate"}
    return Recipe(accumulation=accumulation, parallel=parallel, training=training)


def train(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Losses, statistics of routing, weights and biases after STEPS steps; of this rank."""
    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(make_rows(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    results = [step(batches, step=k, lr=1e-2) for k in range(1, STEPS + 1)]
    biases = {n: b.numpy() for n, b in built.model.named_buffers() if "correction_bias" in n}
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "routing": [result.routing for result in results],
        "weights": whole(dict(built.model.named_parameters())),
        "biases": biases,
    }


SAMPLE = [
    ("deepseek_v3", 2, 2, {"ep_size": 2, "recompute": True}),
    ("qwen3_moe", 2, 1, {"cp_size": 2, "cp_type": "ring", "ep_size": 2}),
]
MORE = [
    (family, world, accumulation, parallel)
    for family in FAMILIES
    for world, accumulation, parallel in (
        (2, 1, {}),
        (2, 2, {"ep_size": 2}),
        (4, 1, {"ep_size": 4, "recompute": True}),
        (4, 2, {"ep_size": 2, "efsdp_shard_placement_fn": "shard_by_dim_1"}),
        (4, 1, {"ep_size": 2, "fsdp_size": 2}),
        (2, 1, {"tp_size": 2}),
        (2, 2, {"tp_size": 2, "ep_size": 2, "recompute": True}),
        (4, 1, {"tp_size": 2, "cp_size": 2, "ep_size": 4}),
        (2, 4, {"pp_size": 2}),
        (4, 4, {"pp_size": 2, "ep_size": 2, "recompute": True}),
    )
]


@pytest.mark.parametrize(
    ("family", "world", "accumulation", "parallel"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)],
)
def test_routing_is_the_same_in_every_layout(
    ranks: RankPool,
    models: dict[str, Path],
    family: str,
    world: int,
    accumulation: int,
    parallel: dict[str, Any],
) -> None:
    wanted = ranks.run(1, train, models[family], recipe_of(family, 1))[0]
    assert all(stats.aux_loss > 0 for stats in wanted["routing"])
    every = ranks.run(world, train, models[family], recipe_of(family, accumulation, **parallel))
    weights, biases = {}, {}
    for got in every:
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        for mine, reference in zip(got["routing"], wanted["routing"], strict=True):
            assert mine.aux_loss == pytest.approx(reference.aux_loss, rel=1e-5)
            assert mine.max_load == reference.max_load
            assert (mine.unused_experts, mine.experts) == (reference.unused_experts, reference.experts)
        weights |= got["weights"]
        biases |= got["biases"]
    assert largest_relative_difference(weights, wanted["weights"]) <= 1e-5
    assert biases.keys() == wanted["biases"].keys()
    for name, bias in wanted["biases"].items():
        np.testing.assert_array_equal(biases[name], bias, err_msg=name)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_bias_moves_as_counted(ranks: RankPool, models: dict[str, Path], family: str) -> None:
    """After STEPS steps each bias is its start plus rate x a sum of STEPS signs."""
    from safetensors.numpy import load_file

    got = ranks.run(1, train, models[family], recipe_of(family, 1))[0]
    start = load_file(models[family] / "model.safetensors")
    assert len(got["biases"]) == 2
    for name, bias in got["biases"].items():
        moves = (bias - start[name]) / TRAINING["router_bias_update_rate"]
        np.testing.assert_allclose(moves, moves.round(), atol=1e-4, err_msg=name)
        assert np.abs(moves).max() >= 1 and np.abs(moves).max() <= STEPS + 1e-4


def save_and_export(folder: Path, recipe: Recipe, out: Path) -> dict[str, np.ndarray]:
    """The biases after a step; they are the same once a model that never moved has read the checkpoint."""
    from shardyard.checkpoint import CheckpointStore, export_hf

    built, step, meshes = build_step(folder, recipe)
    step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    moved = biases_of(built.model)
    export_hf(built.model, out_dir=out / "exported", source_dir=folder, tokenizer=None)
    store = CheckpointStore(out, save_total_limit=None)
    path = store.save(1, model=built.model, optimizer=step.optimizer, run_state={})
    other, again, _ = build_step(folder, recipe)
    assert not np.array_equal(*(biases_of(m)[min(moved)] for m in (built.model, other.model)))
    store.load(path, model=other.model, optimizer=again.optimizer)
    for name, bias in biases_of(other.model).items():
        np.testing.assert_array_equal(bias, moved[name])
    return moved


def biases_of(model: Any) -> dict[str, np.ndarray]:
    return {n: b.numpy().copy() for n, b in model.named_buffers() if "correction_bias" in n}


def test_the_bias_is_saved_and_exported(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    recipe = recipe_of("deepseek_v3", 1, ep_size=2)
    moved = ranks.run(2, save_and_export, models["deepseek_v3"], recipe, tmp_path)[0]
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, bias in moved.items():
        assert exported[name].dtype == np.float32
        np.testing.assert_array_equal(exported[name], bias)


def weights_in_bf16(folder: Path) -> set[str]:
    """The dtypes in which routing weights reach experts, split and computed in bf16."""
    built, step, meshes = build_step(folder, recipe_of("deepseek_v3", 1, ep_size=2, param_dtype="bf16"))
    found: set[str] = set()
    for module in built.model.modules():
        if type(module).__name__.endswith("DeepseekV3Experts"):
            split = module.forward
            module.forward = lambda hidden, index, weights, split=split: (
                found.add(f"{hidden.dtype} {weights.dtype}"),
                split(hidden, index, weights),
            )[1]
    result = step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    assert np.isfinite(result.loss)
    return found


def test_routing_weights_stay_in_fp32(ranks: RankPool, models: dict[str, Path]) -> None:
    for found in ranks.run(2, weights_in_bf16, models["deepseek_v3"]):
        assert found == {"torch.bfloat16 torch.float32"}
