"""Weights keep names, shapes, dtypes and bytes from Hugging Face to DCP and back, and out of a run's own
checkpoints, in any number of files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.conversions import as_held, held_in
from support.models import write_tiny_model
from support.training import Recipe, build_step

from shardyard.checkpoint import fault_of

FAMILIES = ("llama_tied", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")


def run(source: Path, target: Path, to: str, **options):
    from shardyard.convert.job import Conversion, convert

    return convert(Conversion(source, target, to, **options))


def there_and_back(tmp_path: Path, family: str, dtype: str, shard_bytes: int) -> None:
    source = write_tiny_model(tmp_path / "source", family, dtype=dtype)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    outcome = run(source, tmp_path / "dcp", "dcp", shard_bytes=shard_bytes, check=True)
    assert fault_of(tmp_path / "dcp") is None
    files = list((tmp_path / "dcp").glob("*.distcp"))
    assert len(files) > 1 if shard_bytes < 10**9 else len(files) == 1
    back = run(tmp_path / "dcp", tmp_path / "hf", "hf", shard_bytes=shard_bytes, check=True)
    wanted = held_in(source)
    assert held_in(tmp_path / "hf") == wanted
    assert outcome.verified and outcome.verified.tensors == len(wanted) == back.tensors
    assert outcome.verified.bytes == sum(len(data) for _, _, data in wanted.values())
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "hf/config.json").read_text()) == config
    assert (tmp_path / "hf/chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(tmp_path.glob("*/.conv*")) and not list(tmp_path.glob("**/*.tmp-*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_in_several_files_changes_no_bit(tmp_path, family):
    there_and_back(tmp_path, family, "bfloat16", 30_000)


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_there_and_back_in_one_file_changes_no_bit(tmp_path, family):
    there_and_back(tmp_path, family, "float32", 10**10)


@pytest.mark.soak
@pytest.mark.parametrize("shard_bytes", [1, 2_000, 10_000, 10**10])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_over_dtypes_and_file_sizes(tmp_path, family, dtype, shard_bytes):
    there_and_back(tmp_path, family, dtype, shard_bytes)


def test_the_checkpoint_holds_the_model_of_transformers_by_its_names(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    source = write_tiny_model(tmp_path / "source", "qwen3_moe")
    run(source, tmp_path / "dcp", "dcp", shard_bytes=20_000)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    loaded = {f"model.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(loaded[f"model.{name}"], p) for name, p in model.named_parameters())


def save_run(folder: Path, out: Path) -> None:
    from shardyard.checkpoint import CheckpointStore

    built, step, _ = build_step(folder, Recipe())
    CheckpointStore(out, save_total_limit=None).save(
        1, model=built.model, optimizer=step.optimizer, run_state={"data_order": "", "step": 1}
    )


@pytest.mark.parametrize("family", [pytest.param("llama_tied", marks=pytest.mark.soak), "glm4_moe"])
def test_a_run_s_checkpoint_becomes_what_config_json_states(ranks, tmp_path, family):
    """A run holds fp32; parameters go back to bf16, buffers (the routers' bias) stay as they are."""
    source = write_tiny_model(tmp_path / "source", family, dtype="bfloat16")
    ranks.run(2, save_run, source, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/global_step_1"
    run(checkpoint, tmp_path / "hf", "hf", config_dir=source, check=True)
    assert held_in(tmp_path / "hf") == held_in(source)
    kept = run(checkpoint, tmp_path / "kept", "hf", config_dir=source, keep_dtype=True)
    assert [str(dtype) for dtype in kept.dtypes] == ["torch.float32"]
    assert json.loads((tmp_path / "kept/config.json").read_text())["dtype"] == "float32"
    wanted = {name: shape for name, (_, shape, _) in held_in(source).items()}
    found = held_in(tmp_path / "kept")
    assert {name: shape for name, (_, shape, _) in found.items()} == wanted
    assert {dtype for dtype, _, _ in found.values()} == {"torch.float32"}


def test_a_cast_is_that_of_torch_and_overflow_is_named(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from shardyard.errors import UserError

    source = write_tiny_model(tmp_path / "source", "qwen3", dtype="float32")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        run(source, tmp_path / name, "hf", dtype=dtype, check=True)
        wanted = {key: as_held(t.to(dtype)) for key, t in load_file(source / "model.safetensors").items()}
        assert held_in(tmp_path / name) == wanted
        stated = json.loads((tmp_path / name / "config.json").read_text())["dtype"]
        assert stated == str(dtype).removeprefix("torch.")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 70_000.0  # the largest fp16 is 65504
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight holds values up to 7e\+04.*float16"):
        run(source, tmp_path / "overflow", "hf", dtype=torch.float16)
    assert not (tmp_path / "overflow").exists()
    tensors["model.norm.weight"][3] = float("inf")  # is not made, but carried over
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run(source, tmp_path / "inf", "hf", dtype=torch.float16)
    assert load_file(tmp_path / "inf/model.safetensors")["model.norm.weight"][3] == float("inf")


def test_a_head_that_repeats_tied_embeddings_is_written_once_and_one_that_differs_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    from shardyard.errors import UserError

    source = write_tiny_model(tmp_path / "source", "llama_tied")
    wanted = held_in(source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run(source, tmp_path / "hf", "hf", shard_bytes=20_000, check=True)
    assert held_in(tmp_path / "hf") == wanted and "lm_head.weight" not in wanted
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*differ"):
        run(source, tmp_path / "other", "dcp")


def test_tensors_that_the_model_has_no_place_for_are_told(tmp_path):
    """Heads of multi-token prediction stand behind the last layer of DeepSeek-V3's files."""
    import torch
    from safetensors.torch import load_file, save_file

    source = write_tiny_model(tmp_path / "source", "deepseek_v3")
    wanted = held_in(source)
    tensors = load_file(source / "model.safetensors")
    mtp = {f"model.layers.3.mlp.experts.{n}.gate_proj.weight": torch.ones(24, 32) for n in range(4)}
    mtp["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors | mtp, source / "model.safetensors", metadata={"format": "pt"})
    outcome = run(source, tmp_path / "dcp", "dcp", check=True)
    assert set(outcome.left_out) == mtp.keys() and outcome.tensors == len(wanted)
    run(tmp_path / "dcp", tmp_path / "hf", "hf")
    assert held_in(tmp_path / "hf") == wanted
    run(source, tmp_path / "again", "hf", check=True)  # files to files need no model
    assert held_in(tmp_path / "again").keys() == wanted.keys() | mtp.keys()
