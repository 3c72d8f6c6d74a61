"""Invariant: a model that is loaded and exported without a step has the keys, shapes, dtypes and bytes of
its source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def export_here(folder, out, shard_bytes=5e9, tokenizer=None):
    """The same by this process alone, of a model that is plain transformers' own."""
    import torch
    from transformers import AutoModelForCausalLM

    from shardyard.checkpoint import check_exportable, export_hf

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_exportable(model, source_dir=folder, tokenizer=tokenizer)
    out.mkdir(exist_ok=True)
    export_hf(model, out_dir=out, source_dir=folder, tokenizer=tokenizer, shard_bytes=shard_bytes)


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


def sampled(*cells, quick):
    """Parameters of which only ``quick`` are no soak tests; each has ranks to start."""
    return [pytest.param(*cell, marks=() if cell in quick else pytest.mark.soak) for cell in cells]


@pytest.mark.parametrize(
    ("family", "dtype"),
    sampled(
        *((family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")),
        quick=[],  # test_export_round_trip.py has a sample
    ),
)
def test_zero_steps_give_the_source_back_bit_for_bit(ranks, tmp_path, family, dtype):
    folder = write_tiny_model(tmp_path / "source", family, dtype=dtype)
    report, _ = ranks.run(2, export, folder, tmp_path / "out")[0]
    ours, source = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert ours.keys() == source.keys()
    assert all(ours[name] == source[name] for name in source)
    assert report.tensors == len(source) and not list((tmp_path / "out").glob(".*"))


@pytest.mark.soak
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

    both: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = both
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model(input_ids=torch.arange(3, 15)[None]).logits.detach().numpy(), model.config.to_dict()


@pytest.mark.parametrize(("family",), sampled(*((family,) for family in FAMILIES), quick=[("glm4_moe",)]))
def test_plain_transformers_loads_a_trained_export_and_agrees(ranks, tmp_path, family):
    folder, out = write_tiny_model(tmp_path / "source", family), tmp_path / "out"
    _, logits = ranks.run(2, export, folder, out, 5e9, None, 2)[0]
    theirs, config = plain_logits(out)
    assert abs(logits - theirs).max() < 1e-4 * abs(theirs).max()
    assert tensors_of(out) != tensors_of(folder)
    assert config["architectures"] == json.loads((folder / "config.json").read_text())["architectures"]
    assert "distributed_config" not in json.loads((out / "config.json").read_text())


def test_config_and_generation_config_are_the_source_s_own(tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3", dtype="bfloat16"), tmp_path / "out"
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.9}'
    )  # transformers refuses it
    export_here(folder, out)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()


def test_a_model_from_scratch_exports_with_its_overrides(ranks, tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3_moe"), tmp_path / "out"
    recipe = Recipe(model={"train_from_scratch": True, "config_overrides": {"num_hidden_layers": 1}})
    _, logits = ranks.run(1, export, folder, out, 5e9, recipe)[0]
    theirs, config = plain_logits(out)
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


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    sampled((4, {"fsdp_size": 2}), (2, {"cpu_offload": True}), (4, {}), quick=[]),
    ids=str,
)
def test_zero_steps_give_the_source_back_from_any_layout(ranks, tmp_path, world_size, parallel):
    folder = write_tiny_model(tmp_path / "source", "deepseek_v3", dtype="bfloat16")
    ranks.run(world_size, export, folder, tmp_path / "out", 20_000, Recipe(parallel=parallel))
    assert tensors_of(tmp_path / "out") == tensors_of(folder)


def test_a_tied_head_that_the_source_holds_is_written_too(tmp_path):
    from safetensors.torch import load_file, save_file

    folder, out = write_tiny_model(tmp_path / "source", "qwen3_tied"), tmp_path / "out"
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    export_here(folder, out)
    assert tensors_of(out) == tensors_of(folder)


def test_a_former_export_with_other_files_is_replaced(tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "out"
    export_here(folder, out, 20_000)
    export_here(folder, out)
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]


def test_code_that_a_config_names_is_neither_copied_nor_named(tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "out"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    export_here(folder, out)
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert not list(out.glob("*.py")) and not (tmp_path / "marker").exists()


def check_messages(folder, sources):
    from shardyard.checkpoint import check_exportable

    built, _, _ = build_step(folder, Recipe())
    messages = []
    for source in sources:
        try:
            check_exportable(built.model, source_dir=source, tokenizer=None)
            messages.append(None)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_a_quantised_source_is_refused_before_the_first_step(ranks, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder, source = write_tiny_model(tmp_path / "model", "qwen3"), tmp_path / "source"
    source.mkdir()
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, source / "model.safetensors")
    for refused, accepted in ranks.run(2, check_messages, folder, (source, folder)):
        assert refused is not None and refused.startswith("UserError") and name in refused
        assert accepted is None


def export_to_a_full_disk(folder, out):
    """Rank 0 may write no file above 20 kB, which is what a full disk looks like to it."""
    import resource
    import signal

    from shardyard.checkpoint import export_hf

    built, _, _ = build_step(folder, Recipe())
    out.mkdir(exist_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_an_export_to_a_full_disk_fails_on_all_ranks_and_leaves_nothing(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "source", "qwen3")
    for message in ranks.run(2, export_to_a_full_disk, folder, tmp_path / "out"):
        assert message is not None and message.startswith("UserError: exporting to")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_tokenizer_and_its_template_stand_beside_the_weights(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 199)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<pad>")),
        eos_token="</s>",
        pad_token="<pad>",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    folder, out = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "out"
    export_here(folder, out, tokenizer=tokenizer)
    exported = AutoTokenizer.from_pretrained(out)
    ids = exported.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=True, return_dict=False)
    assert ids == [7, 1]


def test_the_weights_are_as_readable_as_the_other_files(tmp_path):
    folder, out = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "out"
    export_here(folder, out)
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
