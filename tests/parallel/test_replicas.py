"""Ranks that must hold the same numbers are compared after the first step; a drift names the parameter."""

from __future__ import annotations

import pytest
from support.parity import write_parity_model
from support.training import Recipe, build_step, make_rows, micro_batches_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parity_model(tmp_path_factory.mktemp("replicas") / "moe", "moe")


def diverged(folder, parallel, name, rank):
    """(how many tensors were compared after a step, the message once ``name`` differs on ``rank``)."""
    import torch.distributed as dist

    from shardyard.checkpoint.state import persistent_tensors
    from shardyard.parallel import check_replicas, local
    from shardyard.parallel.replicas import DivergedError

    built, step, meshes = build_step(folder, Recipe(parallel=parallel))
    step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    compared = check_replicas(persistent_tensors(built.model).items(), meshes)
    if dist.get_rank() == rank:
        shard = local(dict(built.model.named_parameters())[name]).data.view(-1)
        shard[-1] += shard[-1].abs() * 2**-20  # the smallest drift that training would go on with
    try:
        check_replicas(persistent_tensors(built.model).items(), meshes)
    except DivergedError as error:
        return compared, str(error)
    return compared, ""


@pytest.mark.parametrize(
    ("world", "parallel", "name", "rank", "ranks_of_it"),
    [
        (4, {"fsdp_size": 2}, "model.layers.2.self_attn.q_proj.weight", 3, [1, 3]),
        (2, {"tp_size": 2}, "model.layers.0.input_layernorm.weight", 1, [0, 1]),
        (2, {"ignored_modules": ["model.layers.{*}.mlp.gate"]}, "model.layers.3.mlp.gate.weight", 0, [0, 1]),
        (4, {"fsdp_size": 2, "ep_size": 2}, "model.layers.2.mlp.experts.down_proj", 2, [0, 2]),
    ],
)
def test_a_divergence_names_the_parameter_and_the_ranks(
    ranks, folder, world, parallel, name, rank, ranks_of_it
):
    for compared, message in ranks.run(world, diverged, folder, parallel, name, rank):
        assert compared > 0
        assert "1 parameter(s) differ" in message
        assert f"{name} (ranks {ranks_of_it})" in message


def test_without_replicas_nothing_is_compared_and_a_parameter_of_a_split_layer_may_differ(ranks, folder):
    """Every rank of FSDP 2 holds other rows: the change of one is no divergence."""
    name = "model.layers.0.self_attn.q_proj.weight"
    assert ranks.run(2, diverged, folder, {}, name, 1) == [(0, ""), (0, "")]


def test_the_hash_sees_a_permutation_a_sign_and_a_bit():
    import torch

    from shardyard.parallel.replicas import hash_of

    values = torch.arange(1.0, 1001.0)
    different = [values.flip(0), values.roll(1), -values, values + 0.0, values.bfloat16()]
    different[3][17] = torch.nextafter(different[3][17], torch.tensor(1e9))
    hashes = {tuple(hash_of(tensor).tolist()) for tensor in [values, *different]}
    assert len(hashes) == 6
    assert hash_of(values.clone()).tolist() == hash_of(values).tolist()
    assert hash_of(torch.empty(0)).tolist() == [0, 0]
