"""Whole runs, from a YAML to an exported model: resume, epochs, saves, pretraining, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.models import write_tiny_model

from shardyard.errors import UserError

YAML = """
model:
  model_name_or_path: {model}
  cache_dir: {cache}
data:
  template: qwen3
  dataset: {data}
  cutoff_len: 64
parallel: {{}}
training:
  output_dir: {out}
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 2
  lr: 1e-2
  adam_epsilon: 1e-4
  num_train_epochs: 2
  save_steps: 3
  save_epochs: 0
  save_total_limit: null
"""
SAME = ("loss", "lr", "grad_norm", "tokens", "samples", "consumed_samples", "consumed_tokens")


@pytest.fixture
def workspace(tmp_path):
    """A model with a tokenizer, and 14 rows of unequal length: epochs of 3 whole batches of 4 and one of
    2.
    """
    from support.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer(eos="<|im_end|>", pad="<|endoftext|>")
    model = write_tiny_model(tmp_path / "model", "qwen3")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    (model / "model.safetensors").unlink()
    tokenizer.save_pretrained(model)
    rows = [
        {"instruction": f"say {'x' * (i % 5)}{i}", "input": "", "output": f"{i} " * (1 + i % 4)}
        for i in range(14)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"document {i} " * 9}) for i in range(9))
    )
    return tmp_path


def start(workspace: Path, out: str, words: list[str]) -> int:
    """One rank of a run, as train_fsdp2.py would start it."""
    from shardyard.config import load_config
    from shardyard.monitor import setup_logging
    from shardyard.train import run

    os.chdir(workspace)
    text = YAML.format(
        model=workspace / "model",
        cache=workspace / "cache",
        data=workspace / "data.jsonl",
        out=workspace / out,
    )
    path = workspace / f"{out}.{os.environ['RANK']}.yaml"
    path.write_text(text)
    setup_logging(int(os.environ["RANK"]))
    return run(load_config([str(path), "--model.train_from_scratch", "true", *words]))


def train(ranks, workspace, out, *words, world=2):
    ranks.run(world, start, workspace, out, list(words), init_process_group=False)
    return metrics(workspace / out)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(records, keys=SAME):
    return [[record[key] for key in keys] for record in records]


def test_a_run_trains_saves_and_exports(ranks, workspace):
    records = train(ranks, workspace, "run")
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["samples"] for r in records] == [4, 4, 4, 2] * 2
    assert records[-1]["consumed_samples"] == 28
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    out = workspace / "run"
    saved = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert saved == ["exported", "global_step_3", "global_step_6", "global_step_8", "latest"]
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "resolved_config.yaml",
    ):
        assert (out / name).is_file(), name


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(ranks, workspace):
    unbroken = train(ranks, workspace, "unbroken", "--training.logging_steps", "2")
    train(ranks, workspace, "broken", "--training.max_steps", "8", "--training.save_hf_weights", "false")
    for name in (
        "global_step_6",
        "global_step_8",
    ):  # as if it had been killed in step 5, inside the second epoch
        (workspace / "broken" / "checkpoints" / name / "manifest.json").unlink()
    resumed = train(ranks, workspace, "broken", "--training.resume_from_checkpoint", "latest")
    assert values(resumed) == values(unbroken)
    bits = [(workspace / name / "model.safetensors").read_bytes() for name in ("unbroken", "broken")]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("world", [1, 4])
def test_a_run_resumes_on_another_world_size_with_each_sample_once(ranks, workspace, world):
    """The global batch stays 4: the accumulation follows the ranks."""
    words = ["--training.per_device_train_batch_size", "1"]
    unbroken = train(ranks, workspace, "unbroken", *words)
    train(
        ranks,
        workspace,
        "broken",
        *words,
        "--training.max_steps",
        "3",
        "--training.lr_scheduler_type",
        "constant",
    )
    whole = train(ranks, workspace, "constant", *words, "--training.lr_scheduler_type", "constant")
    resumed = train(
        ranks, workspace, "broken", *words, "--training.resume_from_checkpoint", "latest",
        "--training.lr_scheduler_type", "constant", "--training.gradient_accumulation_steps", str(4 // world),
        world=world,
    )  # fmt: skip
    exact = ("tokens", "samples", "consumed_samples", "consumed_tokens", "lr")
    assert values(resumed, exact) == values(whole, exact)
    assert len(unbroken) == len(resumed)
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole], rel=1e-5)
    assert [r["grad_norm"] for r in resumed] == pytest.approx([r["grad_norm"] for r in whole], rel=1e-5)


def test_recompute_offload_hsdp_and_workers_give_the_same_run(ranks, workspace):
    plain = train(ranks, workspace, "plain", "--training.max_steps", "4")
    words = ["--parallel.recompute", "full", "--parallel.cpu_offload", "--parallel.fsdp_size", "1"]
    words += ["--training.dataloader_num_workers", "2", "--training.dataloader_persistent_workers"]
    other = train(ranks, workspace, "other", "--training.max_steps", "4", *words)
    assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
    assert values(other, ("tokens", "consumed_samples", "lr")) == values(
        plain, ("tokens", "consumed_samples", "lr")
    )


@pytest.mark.parametrize(
    ("words", "steps", "samples", "saved"),
    [
        (["--training.max_steps", "10"], 10, 36, [3, 6, 9, 10]),
        (["--training.max_steps", "2"], 2, 8, [2]),
        (["--training.num_train_epochs", "0.5", "--training.save_steps", "0"], 2, 7, []),
        (["--training.num_train_epochs", "1.5"], 6, 21, [3, 6]),
        (["--training.dataloader_drop_last", "--training.save_epochs", "1"], 6, 24, [3, 6]),
        (["--training.save_steps", "4", "--training.save_epochs", "1"], 8, 28, [4, 8]),
        (["--training.save_steps", "0", "--training.save_epochs", "2"], 8, 28, [8]),
    ],
)
def test_steps_samples_and_saves_are_exact(ranks, workspace, words, steps, samples, saved):
    records = train(ranks, workspace, "run", "--training.save_hf_weights", "false", *words)
    assert (len(records), records[-1]["consumed_samples"]) == (steps, samples)
    folder = workspace / "run" / "checkpoints"
    numbers = sorted(int(p.name.removeprefix("global_step_")) for p in folder.glob("global_step_*"))
    assert numbers == saved


def test_pretraining_reads_raw_text_as_one_stream(ranks, workspace):
    words = ["--training.stage", "pt", "--data.data_manager_type", "mg", "--data.template", "null"]
    words += [
        "--data.dataset",
        json.dumps({"file_name": str(workspace / "text.jsonl")}),
        "--data.cutoff_len",
        "32",
    ]
    records = train(ranks, workspace, "pt", *words, "--data.append_eod", "--training.num_train_epochs", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    stream = sum(len(tokenizer(f"document {i} " * 9)["input_ids"]) + 1 for i in range(9))
    assert records[-1]["consumed_tokens"] == stream - 1, "every token but the first is a target once"
    isolated = train(
        ranks, workspace, "iso", *words, "--data.append_eod", "--data.reset_attention_mask",
        "--training.num_train_epochs", "1",
    )  # fmt: skip
    assert isolated[-1]["consumed_tokens"] == stream - 1
    assert [r["loss"] for r in isolated] != [r["loss"] for r in records], (
        "attention stops where a document does"
    )


def refused(ranks, workspace, *words, out="run", world=2) -> str:
    with pytest.raises(AssertionError) as caught:
        train(ranks, workspace, out, *words, world=world)
    causes = caught.value.causes
    assert causes and all(isinstance(cause, UserError) for cause in causes.values()), caught.value
    assert len({str(cause) for cause in causes.values()}) == 1, "every rank says the same"
    return str(caught.value.cause)


def test_user_mistakes_end_every_rank_before_anything_is_written(ranks, workspace):
    missing = str(workspace / "nowhere")
    cases = {
        "model.model_name_or_path": ["--model.model_name_or_path", missing],
        "fsdp_size": ["--parallel.fsdp_size", "3"],
        "data.jsonl.nope": ["--data.dataset", f"{workspace}/data.jsonl.nope"],
        "resume_from_checkpoint": ["--training.resume_from_checkpoint", missing],
    }
    for number, (named, words) in enumerate(cases.items()):
        message = refused(ranks, workspace, *words, out=f"bad{number}")
        assert named in message, message
        assert (
            not list(workspace.glob(f"bad{number}/*.jsonl"))
            and not (workspace / f"bad{number}/checkpoints").exists()
        )


def test_a_folder_with_another_run_is_refused_and_kept(ranks, workspace):
    short = ["--training.max_steps", "1", "--training.save_hf_weights", "false"]
    first = train(ranks, workspace, "run", *short)
    assert "overwrite_output_dir" in refused(ranks, workspace, *short)
    assert metrics(workspace / "run") == first
    train(ranks, workspace, "run", *short, "--training.overwrite_output_dir")
    (moved,) = workspace.glob("run.old-*")
    assert metrics(moved) == first


def test_resuming_on_other_data_or_into_another_run_s_folder_is_refused(ranks, workspace):
    short = ["--training.max_steps", "2", "--training.save_hf_weights", "false"]
    train(ranks, workspace, "run", *short)
    resume = [*short, "--training.resume_from_checkpoint", "latest"]
    for words in (["--training.seed", "7"], ["--data.cutoff_len", "40"], ["--training.disable_shuffling"]):
        assert "counts its place in other data" in refused(ranks, workspace, *resume, *words)
    train(ranks, workspace, "third", *short)
    path = str(workspace / "run" / "checkpoints" / "global_step_2")
    assert "holds another run" in refused(
        ranks, workspace, *short, "--training.resume_from_checkpoint", path, out="third"
    )


def test_weights_alone_start_a_new_run_in_a_folder_of_their_own(ranks, workspace):
    words = ["--training.save_hf_weights", "false", "--training.save_only_model"]
    before = train(ranks, workspace, "run", *words, "--training.max_steps", "2")
    path = str(workspace / "run" / "checkpoints" / "global_step_2")
    words += ["--training.resume_from_checkpoint", path, "--training.max_steps", "1"]
    assert "weights only" in refused(ranks, workspace, *words)
    assert metrics(workspace / "run") == before
    (record,) = train(ranks, workspace, "next", *words)
    assert record["step"] == 1 and record["loss"] < before[0]["loss"]


def test_latest_without_a_checkpoint_starts_at_zero(ranks, workspace):
    records = train(
        ranks, workspace, "run", "--training.resume_from_checkpoint", "latest", "--training.max_steps", "2"
    )
    assert [r["step"] for r in records] == [1, 2]
