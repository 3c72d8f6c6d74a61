"""What a rank keeps and what a step needs at its peak, measured from tensors: the arithmetic to the byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from support.models import write_tiny_model
from support.training import Recipe, make_rows

FP32 = 4
LAYERS, HIDDEN, MLP, VOCAB = 4, 32, 56, 200
QUERY, KV, HEAD_DIM = 64, 32, 8
"""Rows of the projections: 8 query heads and 4 of key and value, of 8."""
EXPERTS, EXPERT_MLP, DENSE_LAYER = 4, 24, 1


@dataclass(frozen=True)
class Split:
    """A layout: how many ranks share the rows of a tensor, and which of them this is."""

    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    efsdp: int = 1
    stages: int = 1


def layer_shapes(layer: int, family: str) -> list[tuple[tuple[int, ...], int | None, bool]]:
    """(shape, dimension that tp splits, whether of experts) of each tensor of a layer."""
    shapes: list[tuple[tuple[int, ...], int | None, bool]] = [
        ((QUERY, HIDDEN), 0, False), ((KV, HIDDEN), 0, False), ((KV, HIDDEN), 0, False),
        ((HIDDEN, QUERY), 1, False), ((HEAD_DIM,), None, False), ((HEAD_DIM,), None, False),
        ((HIDDEN,), None, False), ((HIDDEN,), None, False),
    ]  # fmt: skip
    if family == "parity_dense" or layer == DENSE_LAYER:
        return [*shapes, ((MLP, HIDDEN), 0, False), ((MLP, HIDDEN), 0, False), ((HIDDEN, MLP), 1, False)]
    return [
        *shapes, ((EXPERTS, HIDDEN), None, False), ((EXPERTS, 2 * EXPERT_MLP, HIDDEN), None, True),
        ((EXPERTS, HIDDEN, EXPERT_MLP), None, True),
    ]  # fmt: skip


def shapes_of(family: str, stage: int, stages: int) -> list[tuple[tuple[int, ...], int | None, bool]]:
    """Of a stage: the first has the embedding, the last the norm and the head, one matrix if tied."""
    tied = family == "parity_dense"
    first, last = stage == 0, stage == stages - 1
    matrix = ((VOCAB, HIDDEN), 0, False)
    share = LAYERS // stages
    shapes = [s for layer in range(stage * share, (stage + 1) * share) for s in layer_shapes(layer, family)]
    shapes += [matrix] * (1 if tied and first and last else first + last)
    return shapes + [((HIDDEN,), None, False)] * last


def bytes_of(family: str, split: Split, stage: int, shard: int, expert_shard: int) -> int:
    """Parameters and gradients are padded to a multiple of the shards, the two moments of AdamW are not; each
    tensor has a step count.
    """
    total = 0
    for shape, tp_dim, is_experts in shapes_of(family, stage, split.stages):
        local = list(shape)
        if is_experts:
            local[0] //= split.ep
        elif tp_dim is not None:
            local[tp_dim] //= split.tp
        apart = is_experts and (split.ep > 1 or split.tp > 1)
        shards, rank = (split.efsdp, expert_shard) if apart else (split.fsdp, shard)
        rows = math.ceil(local[0] / shards)
        mine = max(0, min(rows, local[0] - rank * rows))
        row = math.prod(local[1:])
        total += FP32 * row * (2 * rows + 2 * mine) + FP32
    return total


def kept(folder, rows, recipe):
    """Bytes of parameters, gradients and optimizer state after a step, before gradients are dropped."""
    from support.live_memory import bytes_kept
    from support.training import build_step, micro_batches_of

    _, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(rows, recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    drop, step.optimizer.zero_grad = step.optimizer.zero_grad, lambda **_: None
    step(batches, step=1, lr=1e-2)
    parameters = list(step.optimizer.param_groups[0]["params"]) + [
        p for group in step.optimizer.param_groups[1:] for p in group["params"]
    ]
    states = [t for state in step.optimizer.state.values() for t in state.values()]
    found = bytes_kept([*parameters, *(p.grad for p in parameters), *states])
    drop(set_to_none=True)
    return found


CASES: dict[str, tuple[int, dict[str, Any], Split, str]] = {
    "FSDP 1": (1, {}, Split(), "parity_dense"),
    "FSDP 2": (2, {}, Split(fsdp=2), "parity_dense"),
    "FSDP 3, uneven": (3, {}, Split(fsdp=3), "parity_dense"),
    "FSDP 4": (4, {}, Split(fsdp=4), "parity_moe"),
    "FSDP 2, offload": (2, {"cpu_offload": True}, Split(fsdp=2), "parity_dense"),
    "HSDP 2x2": (4, {"fsdp_size": 2}, Split(fsdp=2), "parity_dense"),
    "TP 2": (2, {"tp_size": 2}, Split(tp=2), "parity_dense"),
    "FSDP 2 x TP 2": (4, {"tp_size": 2}, Split(fsdp=2, tp=2), "parity_dense"),
    "EP 2": (2, {"ep_size": 2}, Split(fsdp=2, ep=2), "parity_moe"),
    "EP 2 x EFSDP 2": (4, {"ep_size": 2}, Split(fsdp=4, ep=2, efsdp=2), "parity_moe"),
    "TP 2, experts over both": (2, {"tp_size": 2}, Split(tp=2, efsdp=2), "parity_moe"),
    "PP 2": (2, {"pp_size": 2, "pp_layers_per_stage": [2, 2]}, Split(stages=2), "parity_dense"),
    "PP 2 x FSDP 2": (
        4,
        {"pp_size": 2, "pp_layers_per_stage": [2, 2]},
        Split(fsdp=2, stages=2),
        "parity_moe",
    ),
}
QUICK = {"FSDP 3, uneven", "FSDP 2 x TP 2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CASES]
)
def test_a_rank_keeps_its_share(ranks, model_zoo, name):
    world, parallel, split, family = CASES[name]
    recipe = Recipe(parallel=parallel, accumulation=split.stages)
    found = ranks.run(world, kept, model_zoo.folder(family), make_rows(24), recipe)
    per_stage = world // split.stages
    expected = [
        bytes_of(
            family, split, rank // per_stage, rank % per_stage // split.tp % split.fsdp,
            rank % per_stage // split.ep % split.efsdp,
        )
        for rank in range(world)
    ]  # fmt: skip
    assert found == expected


def peak(folder, recipe, tokens):
    """The most bytes alive in a forward and backward of one row, beyond what was there before."""
    from support.live_memory import LivePeak
    from support.training import build_step, micro_batches_of

    _, step, meshes = build_step(folder, recipe)
    ids = [3 + i % 90 for i in range(tokens)]
    rows = [(ids, [-100] * (tokens - 4) + ids[:4])] * meshes.dp_size
    batches = micro_batches_of(rows, 1, meshes.dp_rank, meshes.dp_size)
    step(batches, step=1, lr=1e-2)
    peaks = []
    for number in range(2, 7):
        with LivePeak() as memory:
            step(batches, step=number, lr=1e-2)
        peaks.append(memory.peak)
    return min(peaks)  # gloo's threads may hold what they have sent a moment longer on a busy machine


TOKENS = 768


@pytest.mark.parametrize(
    ("parallel", "world", "share"),
    [
        ({}, 1, 1),
        pytest.param({}, 2, 1, marks=pytest.mark.soak),
        pytest.param({"tp_size": 2}, 2, 2, marks=pytest.mark.soak),
        pytest.param({"cp_size": 2}, 2, 2, marks=pytest.mark.soak),
    ],
)
def test_with_recompute_each_layer_keeps_one_hidden_state(ranks, tmp_path, parallel, world, share):
    """To the byte: at the peak, in the last layer's backward, each layer's input is alive, nothing else."""
    peaks = {}
    for layers in (4, 8, 16):
        kinds = ["full_attention"] * layers
        folder = write_tiny_model(
            tmp_path / str(layers), "parity_dense", num_hidden_layers=layers, layer_types=kinds
        )
        recipe = Recipe(parallel={"recompute": "full", **parallel})
        peaks[layers] = ranks.run(world, peak, folder, recipe, TOKENS)
    hidden = TOKENS // share * HIDDEN * FP32
    for rank in range(world):
        assert peaks[8][rank] - peaks[4][rank] == 4 * hidden
        assert peaks[16][rank] - peaks[8][rank] == 8 * hidden


def peak_of_rows(folder, recipe, rows, tokens):
    """The most bytes alive in a step of one micro-batch of ``rows`` rows with few labels."""
    from support.live_memory import LivePeak
    from support.training import build_step, micro_batches_of

    _, step, _ = build_step(folder, recipe)
    ids = [3 + i % 90 for i in range(tokens)]
    batches = micro_batches_of([(ids, [-100] * (tokens - 1) + [5])] * rows, 1, 0, 1)
    step(batches, step=1, lr=1e-2)
    with LivePeak() as memory:
        step(batches, step=2, lr=1e-2)
    return memory.peak


def test_pieces_of_rows_bound_what_a_layer_needs_inside(ranks, model_zoo):
    """A piece is an eighth of the micro-batch; what is kept between layers is not inside any."""
    folder, rows, tokens = model_zoo.folder("parity_dense"), 8, 96
    kept = LAYERS * rows * tokens * HIDDEN * FP32
    whole, pieces = (
        ranks.run(1, peak_of_rows, folder, Recipe(parallel={"recompute": True} | chunks), rows, tokens)[0]
        for chunks in ({}, {"enable_chunk_batch": True, "chunk_mbs": 1})
    )
    assert pieces - kept < 0.5 * (whole - kept)
