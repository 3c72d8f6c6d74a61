"""The start-up table of layouts: counts are those of the whole model, bytes worked out from its shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step


def rank_of_table(folder: Path, recipe: Recipe, **training: Any) -> dict[str, str]:
    import torch

    from shardyard.config import TrainingConfig
    from shardyard.models.table import startup_table

    built, step, meshes = build_step(folder, recipe)
    settings = TrainingConfig(output_dir="o", **training)
    lines = startup_table(built, meshes, step.group, torch.float32, settings)
    return {line[:22].rstrip(): line[22:] for line in lines}


def _mib(numbers: float) -> str:
    return f"{numbers * 4 / 2**20:,.1f} MiB"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that a tenth of a MiB tells the layouts apart: hidden 256, a vocabulary of 4096."""
    return write_tiny_model(
        tmp_path_factory.mktemp("table"),
        "qwen3_tied",
        hidden_size=256,
        vocab_size=4096,
        intermediate_size=512,
    )


EMBED = 4096 * 256
BLOCK = 2 * 256 * 32 + 2 * 256 * 16 + 3 * 256 * 512 + 2 * 256 + 2 * 8  # q and o, k and v, mlp, norms
WHOLE = EMBED + 2 * BLOCK + 256
LAST_STAGE = EMBED + BLOCK + 256  # the head is the embedding


@pytest.mark.parametrize(
    ("world", "parallel", "held", "most", "more"),
    [
        pytest.param(1, {}, WHOLE, "", None, marks=pytest.mark.soak),
        pytest.param(2, {}, WHOLE / 2, "", None, marks=pytest.mark.soak),
        (2, {"pp_size": 2}, LAST_STAGE, ", on the rank that holds most", None),
        pytest.param(2, {"fsdp_size": 1}, WHOLE, "", WHOLE / 2, marks=pytest.mark.soak),
        (4, {"fsdp_size": 2, "ignored_modules": ["model.embed_tokens"]}, EMBED + BLOCK, "", BLOCK / 2),
    ],
    ids=["one", "fsdp", "pp", "hsdp", "hsdp, ignored"],
)
def test_counts_and_bytes(
    ranks: Any, large: Path, world: int, parallel: dict[str, Any], held: float, most: str, more: float | None
) -> None:
    recipe = Recipe(parallel=parallel, model={"freeze": ["model.norm"]})
    tables = ranks.run(world, rank_of_table, large, recipe)
    assert all(table == tables[0] for table in tables)
    table = tables[0]
    assert table["parameters"] == f"{WHOLE:,}"
    assert table["trainable"] == f"{WHOLE - 256:,}"
    sizes = f"{_mib(held)} parameters, {_mib(held)} gradients, {_mib(2 * held)} optimizer"
    assert table["bytes per rank"] == sizes + most
    assert ("hybrid sharding" in table) == (more is not None)
    if more is not None:
        assert f" cost each rank {_mib(more)} of parameters more" in table["hybrid sharding"]


def test_a_step_in_the_backward_keeps_no_gradients_and_the_state_s_dtype_is_told(
    ranks: Any, large: Path
) -> None:
    words = {"optimizer_in_backward": True, "optimizer_state_dtype": "bf16"}
    table = ranks.run(1, rank_of_table, large, Recipe(), **words)[0]
    assert " a unit at a time of gradients, " in table["bytes per rank"]
    assert table["dtype of optimizer"] == "bf16 (adamw)"
