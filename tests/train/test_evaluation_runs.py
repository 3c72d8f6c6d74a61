"""Whole runs with validation data: a YAML in, validations, early stopping and the best weights exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.models import write_tiny_model

YAML = """
model:
  model_name_or_path: {model}
  cache_dir: {cache}
  train_from_scratch: true
data:
  template: qwen3
  dataset: {data}
  cutoff_len: 64
parallel: {{}}
training:
  output_dir: {out}
  per_device_train_batch_size: 2
  per_device_eval_batch_size: 3
  lr: 1e-2
  adam_epsilon: 1e-4
  max_steps: 6
  save_steps: 2
  save_epochs: 0
  save_total_limit: null
  eval_steps: 2
  eval_on_start: true
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A model with a tokenizer, and 14 rows of unequal length."""
    from support.tokenizers import byte_tokenizer

    model = write_tiny_model(tmp_path / "model", "qwen3")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    (model / "model.safetensors").unlink()
    byte_tokenizer(eos="<|im_end|>", pad="<|endoftext|>").save_pretrained(model)
    rows = [
        {"instruction": f"say {'x' * (i % 5)}{i}", "input": "", "output": f"{i} " * (1 + i % 4)}
        for i in range(14)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


def start(workspace: Path, out: str, words: list[str]) -> int:
    """One rank of a run, as train_fsdp2.py would start it."""
    from shardyard.config import load_config
    from shardyard.monitor import setup_logging
    from shardyard.train import run

    os.chdir(workspace)
    named = {"model": workspace / "model", "cache": workspace / "cache", "data": workspace / "data.jsonl"}
    path = workspace / f"{out}.{os.environ['RANK']}.yaml"
    path.write_text(YAML.format(**named, out=workspace / out))
    setup_logging(int(os.environ["RANK"]))
    return run(load_config([str(path), *words]))


def train(ranks: Any, workspace: Path, out: str, *words: str, world: int = 2) -> list[dict[str, Any]]:
    """The validations of a run that ends with 0 on every rank."""
    from shardyard.monitor import read_validations

    assert ranks.run(world, start, workspace, out, list(words), init_process_group=False) == [0] * world
    return read_validations(workspace / out / "metrics.jsonl")


def losses(validations: list[dict[str, Any]]) -> dict[int, float]:
    return {values["step"]: values["eval"]["all"]["loss"] for values in validations}


def test_rows_held_out_are_validated_and_the_best_weights_exported(ranks, workspace):
    """The learning rate is far too high: the first updates are the best or the start is, never the last."""
    words = ["--data.val_size", "4", "--training.lr", "3", "--training.lr_scheduler_type", "constant"]
    words += ["--training.keep_best_checkpoint", "--training.load_best_model_at_end"]
    validations = train(ranks, workspace, "run", *words, "--training.early_stopping_patience", "2")
    found = losses(validations)
    assert list(found) == [0, 2, 4], "two validations after the start without improvement"
    assert min(found, key=lambda step: found[step]) == 0
    out = workspace / "run"
    assert (out / "checkpoints" / "best").read_text() == "global_step_0\n"
    assert (out / "checkpoints" / "latest").read_text() == "global_step_4\n"
    exported = exported_weights(out)
    best, last = (saved_weights(out, step, exported) for step in (0, 4))
    assert exported.keys() == best.keys() and len(exported) == 25
    assert all(torch.equal(exported[name], best[name]) for name in exported)
    assert not any(torch.equal(exported[name], last[name]) for name in exported)


def exported_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def saved_weights(out: Path, step: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, read with torch alone."""
    tensors = {f"model.{name}": torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    dcp.load(tensors, checkpoint_id=out / "checkpoints" / f"global_step_{step}", no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.soak
@pytest.mark.parametrize("at", [2, 4])
def test_a_resumed_run_validates_as_the_unbroken_one(ranks, workspace, at):
    (workspace / "held_out.jsonl").write_text((workspace / "data.jsonl").read_text())
    words = ["--data.eval_dataset", str(workspace / "held_out.jsonl"), "--training.keep_best_checkpoint"]
    unbroken = train(ranks, workspace, "unbroken", *words)
    assert list(losses(unbroken)) == [0, 2, 4, 6] and losses(unbroken)[6] < losses(unbroken)[0] - 0.1
    train(ranks, workspace, "broken", *words)
    for step in range(at + 1, 7):
        shutil.rmtree(workspace / "broken" / "checkpoints" / f"global_step_{step}", ignore_errors=True)
    resumed = train(ranks, workspace, "broken", *words, "--training.resume_from_checkpoint", "latest")
    assert losses(resumed) == losses(unbroken), "each validation once, bit for bit"
    for name in ("best", "latest"):
        pointers = [workspace / run / "checkpoints" / name for run in ("unbroken", "broken")]
        assert pointers[0].read_text() == pointers[1].read_text()
    assert weights_equal(workspace / "unbroken", workspace / "broken")


def weights_equal(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
