"""Building: weights that do not depend on the layout, dtypes, freezing, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support.models import FAMILIES, write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, train_rows, whole

from shardyard.errors import UserError


def initial_weights(folder, recipe):
    built, _, _ = build_step(folder, recipe)
    return whole(dict(built.model.named_parameters())), whole(dict(built.model.named_buffers()))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_scratch_starts_from_the_same_weights_on_any_layout(ranks, tmp_path, family):
    folder = write_tiny_model(tmp_path / family, family)
    recipe = Recipe(model={"train_from_scratch": True})
    alone, buffers = ranks.run(1, initial_weights, folder, recipe)[0]
    for world, parallel in ((2, {}), (4, {"fsdp_size": 2})):
        split, _ = ranks.run(world, initial_weights, folder, Recipe(model=recipe.model, parallel=parallel))[0]
        assert split.keys() == alone.keys()
        assert all(np.array_equal(split[name], alone[name]) for name in alone)
    matrices = [w for name, w in alone.items() if w.ndim >= 2]
    assert all(0.01 < w.std() < 0.04 for w in matrices), "initializer_range is 0.02"
    assert len({w.tobytes() for w in matrices}) == len(matrices), "no two tensors hold the same draw"
    assert all(np.isfinite(b).all() for b in buffers.values())


def test_from_scratch_rotary_buffers_are_those_of_the_loaded_model(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    _, scratch = ranks.run(2, initial_weights, folder, Recipe(model={"train_from_scratch": True}))[0]
    _, loaded = ranks.run(1, initial_weights, folder, Recipe())[0]
    assert scratch.keys() == loaded.keys()
    assert all(np.array_equal(scratch[name], loaded[name]) for name in loaded)


def stored_dtypes(folder, recipe):
    import torch

    built, step, meshes = build_step(folder, recipe)
    result = step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-6)
    state = step.optimizer.state
    moments = {str(v.dtype) for s in state.values() for v in s.values() if torch.is_tensor(v)}
    return {str(p.dtype) for p in built.model.parameters()}, moments, result.loss


def test_bf16_compute_keeps_fp32_weights_and_moments(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3", dtype="bfloat16")
    storage, moments, loss = ranks.run(2, stored_dtypes, folder, Recipe(parallel={"param_dtype": "bf16"}))[0]
    assert storage == {"torch.float32"} and moments == {"torch.float32"}
    _, _, exact = ranks.run(2, stored_dtypes, folder, Recipe(parallel={"param_dtype": "fp32"}))[0]
    assert loss != exact and loss == pytest.approx(exact, rel=0.02)


def test_frozen_parameters_keep_their_bytes_and_the_others_move(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    before, _ = ranks.run(1, initial_weights, folder, Recipe())[0]
    recipe = Recipe(model={"freeze": ["model.embed_tokens", "*.q_proj"]}, steps=2)
    after = ranks.run(2, train_rows, folder, make_rows(), recipe)[0].weights
    for name, weight in before.items():
        frozen = "embed_tokens" in name or ".q_proj." in name
        assert np.array_equal(weight, after[name]) is frozen, name


def refused(ranks, folder, recipe) -> str:
    with pytest.raises(AssertionError) as caught:
        ranks.run(1, initial_weights, folder, recipe)
    cause = caught.value.cause
    assert isinstance(cause, UserError), cause
    return str(cause)


def test_missing_tensors_are_refused_by_name(ranks, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_model(tmp_path / "m", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight" in refused(ranks, folder, Recipe())


def test_other_shapes_nan_and_absent_weights_are_refused(ranks, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_model(tmp_path / "m", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    wide = shutil.copytree(folder, tmp_path / "wide")
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    assert "weights of" in refused(ranks, wide, Recipe()) or "another shape" in refused(ranks, wide, Recipe())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight" in refused(ranks, folder, Recipe())
    (folder / "model.safetensors").unlink()
    assert "train_from_scratch" in refused(ranks, folder, Recipe())


def test_a_model_id_that_disagrees_and_unknown_overrides_are_refused(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    assert "model.model_id" in refused(ranks, folder, Recipe(model={"model_id": "gpt_oss"}))
    assert "num_hidden_layers" in refused(
        ranks, folder, Recipe(model={"config_overrides": {"num_hidden_layer": 1}})
    )


def test_a_tie_that_the_weights_contradict_is_refused(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "tie_word_embeddings" in refused(ranks, folder, Recipe())


def test_experts_of_an_odd_width_run_one_by_one(ranks, tmp_path):
    """torch's grouped kernel wants rows of whole 16-byte pieces and raises otherwise."""
    from support.models import write_tiny_model
    from support.training import Recipe, make_rows, train_rows

    folder = write_tiny_model(tmp_path / "odd", "qwen3_moe", moe_intermediate_size=18)
    alone, split = (
        ranks.run(world, train_rows, folder, make_rows(), Recipe(parallel=parallel, steps=2))[0]
        for world, parallel in ((1, {}), (2, {"ep_size": 2}))
    )
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
