"""Parameters split over (fsdp, tp): read, drawn, gathered, saved and loaded, also where nothing divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel.tensor_models import build, write_model


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """The file's tensors, by name; the names are those of the model."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def due(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This rank's part: what tensor parallelism leaves of ``whole``, then what FSDP leaves of that."""
    names, coordinate = parameter.device_mesh.mesh_dim_names, parameter.device_mesh.get_coordinate()
    for axis in sorted(range(len(names)), key=lambda axis: ["tp", "fsdp", "dp_replicate"].index(names[axis])):
        placement = parameter.placements[axis]
        if not placement.is_replicate():
            parts = whole.chunk(parameter.device_mesh.size(axis), placement.dim)
            rank = coordinate[axis]
            whole = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def read_back(folder: Path, **options: Any) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Name -> (whole tensor gathered, this rank's part, the part of the file's that is due)."""
    from torch.distributed.tensor import DTensor

    model, _ = build(folder, **options)
    files = {name: torch.from_numpy(array) for name, array in weights_of(folder).items()}
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole, mine = parameter.full_tensor().detach(), parameter.to_local().detach()
        found[name] = (whole.numpy(), mine.numpy(), due(files[name], parameter).numpy())
    return found


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("case", "changes", "world", "options"),
    [
        # Over 3: 100 words, 28 inner and 16 outer features, biases and norms of 32.
        ("starcoder2", {}, 6, dict(tp_size=2, fsdp_size=3)),
        soak("llama_bias", {}, 4, dict(tp_size=2, fsdp_size=2)),
        soak("llama_bias", dict(tie_word_embeddings=True), 4, dict(tp_size=2, fsdp_size=1)),
        soak("qwen3", {}, 4, dict(tp_size=2, fsdp_size=2, shard_placement_fn="shard_by_dim_1")),
        # A bias of 4 over 3: the last rank has none of it.
        soak(
            "qwen2",
            dict(head_dim=1, num_attention_heads=12, hidden_size=48, intermediate_size=48),
            6,
            dict(tp_size=2, fsdp_size=3, shard_placement_fn="shard_by_dim_1"),
        ),
    ],
    ids=["uneven", "even", "replicas tied", "second dimension", "empty parts"],
)
def test_weights_read_by_the_library_are_the_files(case, changes, world, options, tmp_path, ranks):
    folder = write_model(tmp_path / "model", case, **changes)
    files = weights_of(folder)
    for rank in ranks.run(world, read_back, folder, **options):
        assert rank.keys() == files.keys()
        for name, (whole, mine, expected) in rank.items():
            np.testing.assert_array_equal(whole, files[name], err_msg=name)
            np.testing.assert_array_equal(mine, expected, err_msg=name)


def drawn(folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """The initial weights of a run without weights, gathered."""
    import torch.distributed as dist
    import transformers as hf
    from support.training import whole

    from shardyard.config import ModelConfig, ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device
    from shardyard.models import Placement, build_model
    from shardyard.parallel import build_meshes

    parallel = ParallelConfig(**options)
    meshes = build_meshes(resolve_layout(parallel, dist.get_world_size()), "cpu")
    model = ModelConfig(model_name_or_path=str(folder), train_from_scratch=True)
    config = hf.AutoConfig.from_pretrained(folder)
    built = build_model(model, config, folder, Placement(parallel, meshes, Device("cpu")), seed=3)
    return whole(dict(built.model.named_parameters()))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, dict(tp_size=2)),
        soak(6, dict(tp_size=2, fsdp_size=3)),
    ],
)
def test_initial_weights_do_not_depend_on_the_split(world, options, tmp_path, ranks):
    folder = write_model(tmp_path / "model", "starcoder2", tie_word_embeddings=False)
    (alone,) = ranks.run(1, drawn, folder)
    for weights in ranks.run(world, drawn, folder, **options):
        assert weights.keys() == alone.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, alone[name], err_msg=name)


def save(folder: Path, out: Path, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp

    model, _ = build(folder, **options)
    dcp.save({"model": dict(model.named_parameters())}, checkpoint_id=out)


def load(folder: Path, saved: Path, **options: Any) -> dict[str, np.ndarray]:
    """A model of other weights, overwritten by what was saved."""
    import torch.distributed.checkpoint as dcp
    from support.training import whole

    model, _ = build(folder, **options)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    dcp.load({"model": parameters}, checkpoint_id=saved)
    return whole(parameters)


SPLITS = {
    "one": (1, {}),
    "tp4": (4, dict(tp_size=4)),
    "fsdp2 x tp2": (4, dict(tp_size=2, fsdp_size=2)),
    "fsdp3 x tp2": (6, dict(tp_size=2, fsdp_size=3)),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp3 x tp2", "one"),
        soak("fsdp2 x tp2", "tp4"),
        soak("tp4", "fsdp3 x tp2"),
        soak("one", "fsdp2 x tp2"),
    ],
)
def test_a_checkpoint_of_one_split_loads_in_another(before, after, tmp_path, ranks):
    folder = write_model(tmp_path / "model", "starcoder2", tie_word_embeddings=False)
    files = weights_of(folder)
    world, options = SPLITS[before]
    ranks.run(world, save, folder, tmp_path / "saved", **options)
    world, options = SPLITS[after]
    for weights in ranks.run(world, load, folder, tmp_path / "saved", **options):
        assert weights.keys() == files.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, files[name], err_msg=name)
