"""The examples' scripts train: with a tiny model of the same family in place, on CPU ranks."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.example_scripts import EXAMPLES, SCRIPTS, by_path, copy_outside, run_script

ALWAYS_RUN = ("tune_qwen3_8b_4k_fsdp2_A2", "pretrain_qwen3_8b_4k_fsdp2_A3")
LOSS_LINE = re.compile(
    r"elapsed time per iteration \(ms\):\s+([\d.]+)\s*\|.*?lm loss:\s+(\S+)\s*\|.*?grad norm:\s+([\d.]+)"
)
MEMORY_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+\s*\|.*?max_memory_allocated\(GB\):\s+([\d.]+)")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's assets: a tiny Qwen3 with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "quickstart"))
        importlib.import_module("make_assets").main([str(folder)])
    return folder


def tiny_model(script: Path, quickstart: Path, folder: Path) -> Path:
    """A tiny model of the script's family; the tokenizer is the quick start's."""
    import transformers

    if script.parent.name == "qwen3":
        return quickstart / "model"
    hf: Any = transformers
    tokenizer = hf.AutoTokenizer.from_pretrained(quickstart / "model")
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    if script.parent.name == "qwen3_moe":
        config = hf.Qwen3MoeConfig(
            **sizes, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        )
    else:
        config = hf.LlamaConfig(**sizes, intermediate_size=64, tie_word_embeddings=True)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def training_data(script: Path, quickstart: Path, folder: Path) -> Path:
    """Alpaca rows to tune, a file of plain text to pretrain."""
    if not script.stem.startswith("pretrain"):
        return quickstart / "alpaca.parquet"
    path = folder / "text.jsonl"
    texts = [f"Document {number} says that {number} and {number} are {2 * number}." for number in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=by_path(script), marks=() if script.stem in ALWAYS_RUN else pytest.mark.soak)
        for script in SCRIPTS
    ],
)  # fmt: skip
def test_a_script_trains_logs_and_exports(script: Path, quickstart: Path, tmp_path: Path) -> None:
    model = tiny_model(script, quickstart, tmp_path / "model")
    done = run_script(
        copy_outside(tmp_path), script, "--training.max_steps", "2", "--data.cutoff_len", "64",
        "--training.dataloader_num_workers", "0", "--model.cache_dir", str(tmp_path / "cache"), cwd=tmp_path,
        first_on_path=Path(sys.executable).parent, timeout_s=240, NPROC_PER_NODE="2", OMP_NUM_THREADS="1",
        MODEL_PATH=str(model), DATA_PATH=str(training_data(script, quickstart, tmp_path)), OUTPUT_DIR="run",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "a folder with spaces" / "logs").iterdir()
    text = log.read_text(encoding="utf-8")
    losses = [float(found[1]) for found in LOSS_LINE.findall(text)]
    assert [found[0] for found in MEMORY_LINE.findall(text)] == ["1", "2"]
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    assert len(losses) == 2 and losses[0] == pytest.approx(math.log(vocab_size), rel=0.1)

    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert sorted(path.name for path in run.glob("*.safetensors")) == ["model.safetensors"]
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["vocab_size"] == vocab_size
    assert (run / "checkpoints" / "global_step_2").is_dir()
