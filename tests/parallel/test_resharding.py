"""Parameters that stay on fewer ranks after the forward: the same numbers, gathered from neighbours."""

from __future__ import annotations

from typing import Any

import pytest
from support.configs import load
from support.training import Recipe, make_rows

from shardyard.config import layout_of
from shardyard.errors import UserError

UNITS = 6
"""Of parity_dense: four layers, embedding and head (tied), the root."""


def steps_and_traffic(folder, parallel):
    """Losses, norms and weights of two steps of two micro-batches; the all-gathers of the second step."""
    from support.traffic import Traffic, axes_of
    from support.training import build_step, micro_batches_of, whole_model

    built, step, meshes = build_step(folder, Recipe(parallel=parallel))
    batches = micro_batches_of(make_rows(), 2, meshes.dp_rank, meshes.dp_size)
    first = step(batches, step=1, lr=1e-2)
    with Traffic(axes_of(meshes)) as traffic:
        second = step(batches, step=2, lr=1e-2)
    gathers = {axis: count for (kind, axis), count in traffic.counts().items() if kind == "all-gather"}
    weights = whole_model(dict(built.model.named_parameters()))
    bits = {name: tensor.tobytes() for name, tensor in weights.items()}
    return (first.loss, first.grad_norm, second.loss, second.grad_norm), bits, gathers


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "FSDP 4": (4, "parity_dense", {}),
    "FSDP 4, recompute": (4, "parity_dense", {"recompute": "selective"}),
    "FSDP 4, uneven": (4, "qwen3", {}),
    "FSDP 2 x CP 2": (4, "parity_dense", {"cp_size": 2}),
    "EP 2 on FSDP 4": (4, "parity_moe", {"ep_size": 2}),
    "offload": (4, "parity_dense", {"cpu_offload": True}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "FSDP 4" else pytest.mark.soak) for name in CASES]
)
def test_the_numbers_are_those_of_resharding_to_all(ranks, model_zoo, name):
    world, family, parallel = CASES[name]
    whole, fewer = (
        ranks.run(world, steps_and_traffic, model_zoo.folder(family), parallel | options)[0]
        for options in ({}, {"reshard_after_forward": 2})
    )
    assert fewer[:2] == whole[:2]
    assert sum(fewer[2].values()) == sum(whole[2].values()) and fewer[2]["?"] > 0
    if name == "FSDP 4":
        # What the backwards gather, all units but the root, comes from neighbours.
        forwards, backwards = 2 * UNITS, 2 * (UNITS - 1)
        assert whole[2] == {"fsdp": forwards + backwards}
        assert fewer[2] == {"fsdp": forwards, "?": backwards}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("reshard_after_forward: 3", r"3 does not divide the 8 ranks .*; take 2, 4, 8"),
        ("reshard_after_forward: 2, tp_size: 2", "with tensor parallelism is refused"),
        ("reshard_after_forward: 2, shard_placement_fn: shard_by_dim_1", "sharded by rows"),
        ("reshard_after_forward: -2", "reshard_after_forward"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, told):
    with pytest.raises(UserError, match=told):
        layout_of(load(tmp_path, f"parallel: {{{text}}}").config, 8)


@pytest.mark.parametrize(
    ("text", "value", "number"),
    [("true", True, None), ("1", True, None), ("0", False, None), ("no", False, None), ("4", 4, 4)],
)
def test_a_number_is_no_boolean(tmp_path, text, value, number):
    parallel = load(tmp_path, f"parallel: {{reshard_after_forward: {text}}}").config.parallel
    assert parallel.reshard_after_forward is value or parallel.reshard_after_forward == value == 4
    assert parallel.reshards_to == number
