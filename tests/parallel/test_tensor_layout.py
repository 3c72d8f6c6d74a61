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


def read_back(folder: Path, **options: Any) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Name -> (whole tensor gathered, this rank's part, the part that `local_slice` cuts from the file's)."""
    from torch.distributed.tensor import DTensor

    from shardyard.parallel.tensor import local_slice

    model, _ = build(folder, **options)
    files = {name: torch.from_numpy(array) for name, array in weights_of(folder).items()}
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole, mine = parameter.full_tensor().detach(), parameter.to_local().detach()
        found[name] = (whole.numpy(), mine.numpy(), local_slice(files[name], parameter).numpy())
    return found


@pytest.mark.parametrize(
    ("case", "changes", "world", "options"),
    [
        ("llama_bias", {}, 4, dict(tp_size=2, fsdp_size=2)),
        ("llama_bias", dict(tie_word_embeddings=True), 4, dict(tp_size=2, fsdp_size=1)),
        # 100 words, 16 biases and 28 inner features over 3; norms of 32 over 3.
        ("starcoder2", {}, 6, dict(tp_size=2, fsdp_size=3)),
        ("qwen3", {}, 4, dict(tp_size=2, fsdp_size=2, shard_placement_fn="shard_by_dim_1")),
        # A bias of 4 over tp 2 and fsdp 3: the last rank has none of it.
        ("qwen2", dict(head_dim=1, num_attention_heads=4), 6, dict(tp_size=2, fsdp_size=3)),
    ],
    ids=["even", "replicas tied", "uneven", "second dimension", "empty parts"],
)
def test_weights_read_by_the_library_are_the_files(case, changes, world, options, tmp_path, ranks):
    folder = write_model(tmp_path / "model", case, **changes)
    files = weights_of(folder)
    for rank in ranks.run(world, read_back, folder, **options):
        assert rank.keys() == files.keys()
        for name, (whole, mine, expected) in rank.items():
            np.testing.assert_array_equal(whole, files[name], err_msg=name)
            np.testing.assert_array_equal(mine, expected, err_msg=name)
