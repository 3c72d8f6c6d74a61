"""Invariant: a model that is loaded and exported without a step has the keys, shapes, dtypes and bytes of
its source.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from support.models import FAMILIES, write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of


def export(folder, out, shard_bytes=5e9, recipe=None, steps=0):
    from shardyard.checkpoint import check_exportable, export_hf

    built, step, meshes = build_step(folder, recipe or Recipe())
    check_exportable(built.model, source_dir=folder, tokenizer=None)
    for number in range(steps):
        step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=number + 1, lr=1e-2)
    out.mkdir(exist_ok=True)
    scratch = built.model.config and recipe and recipe.model.get("train_from_scratch")
    report = export_hf(
        built.model,
        out_dir=out,
        source_dir=None if scratch else folder,
        tokenizer=None,
        shard_bytes=shard_bytes,
    )
    import torch

    ids = torch.arange(3, 15)[None]
    logits = built.model(input_ids=ids, position_ids=torch.arange(12)[None], doc_lens=(12,))
    return report, logits.detach().numpy()


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple, bytes]]:
    import torch

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key)
                found[key] = (
                    str(tensor.dtype),
                    tuple(tensor.shape),
                    tensor.view(torch.uint8).numpy().tobytes(),
                )
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_steps_give_the_source_back_bit_for_bit(ranks, tmp_path, family, dtype):
    folder = write_tiny_model(tmp_path / "source", family, dtype=dtype)
    report, _ = ranks.run(2, export, folder, tmp_path / "out")[0]
    ours, source = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert ours.keys() == source.keys()
    assert all(ours[name] == source[name] for name in source)
    assert report.tensors == len(source) and not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_shards_and_their_index_agree(ranks, tmp_path, family):
    folder, out = write_tiny_model(tmp_path / "source", family), tmp_path / "out"
    ranks.run(2, export, folder, out, 20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    for name in files:
        with safe_open(out / name, framework="pt") as file:
            assert {key for key, where in index["weight_map"].items() if where == name} == set(file.keys())
    tensors = tensors_of(out)
    assert tensors == tensors_of(folder)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())


def plain_logits(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model(input_ids=torch.arange(3, 15)[None]).logits.detach().numpy(), model.config.to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_loads_a_trained_export_and_agrees(ranks, tmp_path, family):
    folder, out = write_tiny_model(tmp_path / "source", family), tmp_path / "out"
    _, logits = ranks.run(2, export, folder, out, 5e9, None, 2)[0]
    theirs, config = ranks.run(1, plain_logits, out, init_process_group=False)[0]
    assert abs(logits - theirs).max() < 1e-4 * abs(theirs).max()
    assert tensors_of(out) != tensors_of(folder)
    assert config["architectures"] == json.loads((folder / "config.json").read_text())["architectures"]
    assert "distributed_config" not in json.loads((out / "config.json").read_text())


def test_config_and_generation_config_are_the_source_s_own(ranks, tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3", dtype="bfloat16"), tmp_path / "out"
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.9}'
    )  # transformers refuses it
    ranks.run(1, export, folder, out)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()


def test_a_model_from_scratch_exports_with_its_overrides(ranks, tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3_moe"), tmp_path / "out"
    recipe = Recipe(model={"train_from_scratch": True, "config_overrides": {"num_hidden_layers": 1}})
    _, logits = ranks.run(2, export, folder, out, 5e9, recipe)[0]
    theirs, config = ranks.run(1, plain_logits, out, init_process_group=False)[0]
    assert config["num_hidden_layers"] == 1
    assert abs(logits - theirs).max() < 1e-4 * abs(theirs).max()


def export_of_nan(folder, out):
    import torch

    from shardyard.checkpoint import export_hf

    built, _, _ = build_step(folder, Recipe())
    with torch.no_grad():
        built.model.model.norm.weight.to_local().fill_(float("nan"))
    out.mkdir(exist_ok=True)
    try:
        export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_nan_weights_are_not_exported_and_nothing_is_left(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "source", "qwen3")
    for message in ranks.run(2, export_of_nan, folder, tmp_path / "out"):
        assert "UserError" in message and "model.norm.weight" in message
    assert list((tmp_path / "out").iterdir()) == []
