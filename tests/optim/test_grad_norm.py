"""The gradient norm against the plain sum of squares, on one rank and over shards and replicas."""

from __future__ import annotations

import math

import pytest


def norm_of_known_gradients(fsdp):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from shardyard.config.layout import Layout
    from shardyard.optim import clip_gradients, owned_norms, square_sum
    from shardyard.parallel import answers_for, build_meshes

    world = dist.get_world_size()
    layout = Layout(world, pp=1, dp_replicate=world // fsdp, fsdp=fsdp, cp=1, tp=1, ep=1, ep_fsdp=fsdp)
    meshes = build_meshes(layout, "cpu")
    mesh = meshes.dense["dp_replicate", "fsdp"]
    parameters = []
    # Rows that no number of ranks divides, a vector, a tensor replicated everywhere, one without a gradient.
    for shape, placements in (
        ((7, 3), (Replicate(), Shard(0))),
        ((5,), (Replicate(), Shard(0))),
        ((4, 2), (Replicate(), Replicate())),
    ):
        count = math.prod(shape)
        values = torch.arange(1.0, count + 1).reshape(shape)
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        parameter.grad = distribute_tensor(values, mesh, placements)
        parameters.append(parameter)
    parameters.append(torch.nn.Parameter(torch.zeros(3)))
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([3.0, 4.0])
    parameters.append(plain)
    total = torch.tensor(square_sum(owned_norms(p for p in parameters if answers_for(p, meshes))))
    dist.all_reduce(total)
    norm = math.sqrt(float(total))
    clip_gradients(parameters, norm, 1.0)
    clipped = [p.grad.full_tensor().square().sum().item() for p in parameters[:3]]
    return norm, math.sqrt(sum(clipped) + plain.grad.square().sum().item())


@pytest.mark.parametrize(("world", "fsdp"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)])
def test_the_norm_does_not_depend_on_shards_or_replicas(ranks, world, fsdp):
    squares = sum(sum(k * k for k in range(1, n + 1)) for n in (21, 5, 8)) + 25
    for norm, clipped in ranks.run(world, norm_of_known_gradients, fsdp):
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)


def test_gradients_below_the_bound_and_a_bound_of_zero_change_nothing():
    import torch

    from shardyard.optim import clip_gradients

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    clip_gradients([parameter], 0.5, 1.0)
    clip_gradients([parameter], 0.5, 0.0)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])
