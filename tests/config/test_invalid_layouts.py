"""Thirty layouts that cannot run: `shardyard check` refuses each by name, and what it proposes passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.published_shapes import PUBLISHED

from shardyard.cli import main

MODELS: dict[str, dict[str, Any]] = {
    **PUBLISHED,
    "tiny": {
        "model_type": "llama", "vocab_size": 199, "hidden_size": 48, "intermediate_size": 90,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
    },
    "tiny-shared": {
        "model_type": "glm4_moe", "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64,
        "moe_intermediate_size": 6, "n_shared_experts": 1, "num_hidden_layers": 4, "n_routed_experts": 6,
        "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 160, "n_embd": 32, "n_layer": 4, "n_head": 4},
    "mamba": {
        "model_type": "mamba", "vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 4,
    },
}  # fmt: skip

INVALID: list[tuple[str, int | None, str, str]] = [
    # the number of ranks
    ("Qwen3-8B", 6, "tp_size=4", "parallel.tp_size"),
    ("Qwen3-8B", 8, "tp_size=2 pp_size=3", "parallel.pp_size"),
    ("Qwen3-8B", 8, "fsdp_size=3", "parallel.fsdp_size"),
    ("Qwen3-8B", 8, "fsdp_size=16", "parallel.fsdp_size"),
    ("Qwen3-8B", 16, "tp_size=4 fsdp_size=8", "parallel.fsdp_size"),
    ("Qwen3-8B", 8, "cp_size=3 cp_type=ring", "parallel.cp_size"),
    ("Qwen3-8B", 16, "tp_size=4 cp_size=8", "parallel.cp_size"),
    ("Qwen3-8B", 16, "fsdp_size=2 cp_size=4 cp_type=kvallgather", "parallel.cp_size"),
    ("Qwen3-30B-A3B", 8, "ep_size=16", "parallel.ep_size"),
    ("Qwen3-30B-A3B", 16, "fsdp_size=4 ep_size=8", "parallel.ep_size"),
    ("Qwen3-30B-A3B", 16, "tp_size=4 ep_size=2", "parallel.ep_size"),
    ("Qwen3-30B-A3B", 16, "ep_size=4 ep_fsdp_size=8", "parallel.ep_fsdp_size"),
    # heads, vocabulary and widths
    ("Qwen3-8B", 16, "tp_size=16", "parallel.tp_size"),
    ("Qwen3-30B-A3B", 32, "tp_size=8 ep_size=8", "parallel.tp_size"),
    ("Qwen3-8B", None, "tp_size=5", "parallel.tp_size"),
    ("tiny", 4, "tp_size=2", "parallel.tp_size"),
    ("tiny", 3, "tp_size=3", "parallel.tp_size"),
    ("tiny-shared", 4, "tp_size=4", "parallel.tp_size"),
    ("mamba", 4, "tp_size=2", "parallel.tp_size"),
    ("DeepSeek-V3", 256, "cp_size=64 tp_size=4", "parallel.cp_size"),
    ("Qwen3-0.6B", 32, "cp_size=32", "parallel.cp_size"),
    # experts
    ("gpt-oss-20b", 64, "ep_size=64", "parallel.ep_size"),
    ("Qwen3-8B", 8, "ep_size=4", "parallel.ep_size"),
    ("gpt-oss-20b", 64, "ep_size=1 tp_size=8 efsdp_shard_placement_fn=shard_by_dim_1 fsdp_size=64",
     "parallel.fsdp_size"),
    ("gpt-oss-20b", 128, "ep_size=1 tp_size=2 efsdp_shard_placement_fn=shard_by_dim_1",
     "parallel.efsdp_shard_placement_fn"),
    ("Qwen3-0.6B", 12, "shard_placement_fn=shard_by_dim_1", "parallel.shard_placement_fn"),
    # ranks that would hold no row or no expert, and no other dimension divides
    ("Qwen3-30B-A3B", 192, "", "parallel.ep_fsdp_size"),
    ("Qwen3-30B-A3B", 1024, "ep_size=16 efsdp_shard_placement_fn=shard_by_dim_0", "parallel.ep_fsdp_size"),
    ("gpt-oss-20b", 256, "ep_size=2", "parallel.ep_fsdp_size"),
    ("Qwen3-30B-A3B", 131, "tp_size=2", "parallel.tp_size"),
    ("Qwen3-0.6B", 1536, "tp_size=8", "parallel.fsdp_size"),
    # pipelines
    ("tiny", 4, "pp_size=4", "parallel.pp_size"),
    ("gpt2", 4, "pp_size=2 training.gradient_accumulation_steps=4", "parallel.pp_size"),
    ("DeepSeek-V3", 512, "pp_size=16", "training.gradient_accumulation_steps"),
    ("Qwen3-8B", 8, "pp_size=4 pp_layers_per_stage=[9,9,9,8]", "parallel.pp_layers_per_stage"),
    ("Qwen3-8B", 8, "pp_size=4 pp_layers_per_stage=[12,12,12]", "parallel.pp_layers_per_stage"),
    ("Qwen3-8B", 8, "pp_size=2 pp_stages_per_rank=2", "parallel.pp_stages_per_rank"),
    ("Qwen3-8B", 8, "pp_size=2 pp_schedule=interleaved_1f1b pp_stages_per_rank=1",
     "parallel.pp_stages_per_rank"),
    ("Qwen3-8B", 8, "pp_size=2 pp_schedule=interleaved_1f1b training.gradient_accumulation_steps=5",
     "training.gradient_accumulation_steps"),
    # several at once
    ("DeepSeek-V3", 2048, "pp_size=16 tp_size=3 ep_size=100", "parallel.tp_size"),
]  # fmt: skip


def _check(tmp_path: Path, model: str, world: int | None, words: list[str]) -> int:
    folder = tmp_path / model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    wanted = [word if "." in word.split("=")[0] else f"parallel.{word}" for word in words]
    required = [f"model.model_name_or_path={folder}", f"training.output_dir={tmp_path / 'out'}"]
    return main(["check", *required, *wanted, *([] if world is None else ["--world-size", str(world)])])


@pytest.mark.parametrize(("model", "world", "settings", "key"), INVALID)
def test_an_invalid_layout_is_refused_and_its_suggestions_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, world: int | None, settings: str, key: str
) -> None:
    words = settings.split()
    assert _check(tmp_path, model, world, words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    assert printed.err.startswith(f"error: {key}: "), printed.err
    suggestions = re.findall(r"^  try: (.+)$", printed.err, flags=re.M)
    assert 1 <= len(suggestions) <= 3
    for pasted in suggestions:
        assert _check(tmp_path, model, world, [*words, *pasted.split()]) == 0, pasted
    capsys.readouterr()
    for ranks in _other_worlds(printed.err):
        assert _check(tmp_path, model, ranks, words) == 0, ranks
    assert not (tmp_path / "out").exists()


def _other_worlds(message: str) -> list[int]:
    line = re.search(r"^  or start (.+) ranks$", message, flags=re.M)
    return [int(word) for word in line[1].split(" or ")] if line else []


def test_there_are_thirty_of_them_and_every_key_is_met() -> None:
    assert len(INVALID) >= 30
    assert {key for *_, key in INVALID} == {
        "parallel.tp_size", "parallel.fsdp_size", "parallel.cp_size", "parallel.ep_size",
        "parallel.ep_fsdp_size", "parallel.pp_size", "parallel.pp_stages_per_rank",
        "parallel.pp_layers_per_stage", "parallel.shard_placement_fn", "parallel.efsdp_shard_placement_fn",
        "training.gradient_accumulation_steps",
    }  # fmt: skip


VALID: list[tuple[str, int | None, str]] = [
    ("Qwen3-8B", 8, ""),
    ("Qwen3-8B", None, "tp_size=8 pp_size=4 training.gradient_accumulation_steps=4"),
    ("Qwen3-8B", 64, "tp_size=8 cp_size=4 fsdp_size=4"),
    ("Qwen3-8B", 64, "cp_size=64 cp_type=ring"),
    ("Qwen3-30B-A3B", 64, "tp_size=4 ep_size=64"),
    ("Qwen3-30B-A3B", 16, "ep_size=4 ep_fsdp_size=4"),
    ("Qwen3-30B-A3B", 256, "ep_size=1 tp_size=4"),
    ("DeepSeek-V3", 2048, "pp_size=16 ep_size=64 tp_size=4 training.gradient_accumulation_steps=32"),
    ("gpt-oss-20b", 64, "ep_size=32 tp_size=8"),
    ("gpt-oss-20b", 16, "ep_size=8 efsdp_shard_placement_fn=shard_by_dim_1"),
    ("Qwen3-8B", 8, "pp_size=4 pp_schedule=gpipe"),
    ("Qwen3-8B", 8, "pp_size=4 pp_schedule=interleaved_1f1b training.gradient_accumulation_steps=10"),
    ("Qwen3-8B", 8, "pp_size=4 pp_schedule=interleaved_1f1b training.gradient_accumulation_steps=3"),
    ("Qwen3-8B", 6, "pp_size=3 pp_layers_per_stage=[10,14,12] training.gradient_accumulation_steps=3"),
    ("Qwen3-30B-A3B", 192, "fsdp_size=64"),
    ("Qwen3-30B-A3B", 1024, "ep_size=16"),
    ("gpt-oss-20b", 256, ""),
    ("Qwen3-0.6B", 2048, "tp_size=8"),
    ("mamba", 4, "fsdp_size=2"),
    ("tiny", 3, "fsdp_size=3"),
]


@pytest.mark.parametrize(("model", "world", "settings"), VALID)
def test_near_misses_of_them_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, world: int | None, settings: str
) -> None:
    assert _check(tmp_path, model, world, settings.split()) == 0
    assert "the layout is not checked" not in capsys.readouterr().out


def test_overrides_of_the_model_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tp_size=2", 'model.config_overrides={"vocab_size": 200, "num_key_value_heads": 2}']
    assert _check(tmp_path, "tiny", 4, words) == 0
    assert _check(tmp_path, "tiny", 4, words[:1]) == 2
    assert "3 key/value heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "is not on this machine"), ("{", "is not JSON"), ("[]", "holds no mapping")],
)
def test_without_a_readable_config_the_models_rules_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    words = [f"model.model_name_or_path={tmp_path}", f"training.output_dir={tmp_path}/out"]
    assert main(["check", *words, "parallel.tp_size=7", "--world-size", "14"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "not checked against the model" in line]
    assert len(notes) == 1 and reason in notes[0]
    assert main(["check", *words, "parallel.tp_size=7", "--world-size", "16"]) == 2


def test_the_layouts_groups_and_the_step_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "pp_size=2 tp_size=2 cp_size=2 ep_size=4 training.gradient_accumulation_steps=4"
    batch = "training.per_device_train_batch_size=3 data.cutoff_len=100"
    assert _check(tmp_path, "Qwen3-30B-A3B", 16, [*words.split(), *batch.split()]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    # tp innermost, then fsdp with cp inside it, pp outermost; experts: ep innermost of fsdp x tp
    assert lines >= {
        "each tensor (tp) 2 ranks: (0 1), (2 3), ...",
        "a sequence (cp) 2 ranks: (0 2), (1 3), ...",
        "the parameters (fsdp) 4 ranks: (0 2 4 6), (1 3 5 7), ...",
        "the layers (pp) 2 ranks: (0 8), (1 9), ...",
        "the experts (ep) 4 ranks: (0 1 2 3), (4 5 6 7), ...",
        "each expert (ep_fsdp) 2 ranks: (0 4), (1 5), ...",
        "a step: 2 data-parallel x 4 micro-batches x 3 samples = 24 samples, up to 2400 tokens",
        "a rank: 4 micro-batches of up to 300 / 4 (cp x tp) tokens, 75 at a time",
    }


def test_a_layout_is_judged_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-8B"]), encoding="utf-8")
    words = ["check", f"model.model_name_or_path={tmp_path}", f"training.output_dir={tmp_path}/out"]
    program = (
        "import sys; from shardyard.cli import main; "
        f"codes = [main({words!r} + ['--world-size', '8', 'parallel.tp_size=' + n]) for n in '25']; "
        "print(codes, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 2] []"
