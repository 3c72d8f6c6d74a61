"""Conversions of a checkpoint that would be read wrongly over shards are refused, the others are not."""

from __future__ import annotations

import pytest


def verdict(operation_name, dim, placement_dim, ignored):
    """What `refuse_scrambled` says of a model whose ``proj`` is made by one operation of its files."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    import transformers.core_model_loading as loading
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from shardyard.errors import UserError
    from shardyard.models import reading

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Module()
    placement = Replicate() if ignored else Shard(placement_dim)
    model.proj = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [placement]))
    model.config = SimpleNamespace(model_type="made_up")
    operation = getattr(loading, operation_name)(dim)
    converter = SimpleNamespace(target_patterns=["proj"], operations=[operation])
    reading.get_model_conversion_mapping = lambda model: [converter, SimpleNamespace()]
    try:
        reading.refuse_scrambled(model)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("operation", "dim", "placement", "ignored", "wrong"),
    [
        ("Concatenate", 0, 0, False, True),
        ("Concatenate", -2, 0, False, True),
        ("Concatenate", 1, 0, False, False),
        ("Concatenate", 1, 1, False, True),
        ("Chunk", 0, 0, False, True),
        ("Chunk", 0, 1, False, False),
        ("Transpose", 0, 1, False, True),
        ("MergeModulelist", 0, 0, False, False),
        ("Concatenate", 0, 0, True, False),
    ],
)
def test_what_is_joined_along_shards_is_refused(ranks, world, operation, dim, placement, ignored, wrong):
    for message in ranks.run(world, verdict, operation, dim, placement, ignored):
        assert ("made_up" in message and "proj [8, 4]" in message) == (wrong and world > 1)
