"""inference_fsdp2.py and inference.py: what their words ask for, without a model."""

from __future__ import annotations

import pytest

from shardyard.cli.inference_fsdp2 import read as read_fsdp2
from shardyard.cli.inference_reference import TASKS, asked_of
from shardyard.cli.inference_reference import read as read_megatron
from shardyard.errors import UserError
from shardyard.infer.asked import Asked

LOAD = ["--load", "out"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def yaml(tmp_path, text: str) -> str:
    file = tmp_path / "chat.yaml"
    file.write_text(f"model:\n  model_name_or_path: ./base\n{text}", encoding="utf-8")
    return str(file)


def test_the_yaml_needs_no_data_and_no_training(tmp_path):
    job = read_fsdp2([yaml(tmp_path, "inference:\n  max_new_tokens: 16\n"), "--inference.top_k", "5"])
    assert (job.choice.model, job.choice.parallel, job.choice.template) == ("./base", "none", None)
    assert (job.section["max_new_tokens"], job.section["do_sample"], job.section["top_k"]) == (16, None, 5)
    assert job.backend == "huggingface"


def test_a_training_yaml_keeps_its_template_and_is_greedy_as_the_reference(tmp_path):
    text = (
        "data:\n  dataset: {file_name: x.jsonl}\n  template: qwen3\n  enable_thinking: false\n"
        "training:\n  output_dir: out\nparallel:\n  tp_size: 2\n  recompute: true\n"
    )
    assert read_with_ranks(yaml(tmp_path, text), 1).choice.parallel == "none"
    with pytest.raises(UserError, match=r"parallel\.tp_size 2 with 4 ranks"):
        read_with_ranks(yaml(tmp_path, text), 4)
    job = read_with_ranks(yaml(tmp_path, text), 2)
    assert (job.choice.template, job.choice.enable_thinking, job.choice.parallel) == ("qwen3", False, "tp")
    assert job.section["do_sample"] is False


def read_with_ranks(file: str, count: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(count))
        return read_fsdp2([file])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("inference:\n  max_new_tokens: 0\n", "inference.max_new_tokens: 0 is out of range"),
        ("inference:\n  num_beams: 2\n", "inference.num_beams"),
        ("inference:\n  infer_backend: trt\n", "inference.infer_backend"),
        ("inference:\n  temprature: 1\n", "did you mean"),
        ("training:\n  lrr: 1\n", "training.lrr"),
    ],
)
def test_mistakes_in_the_yaml(tmp_path, text, part):
    with pytest.raises(UserError) as caught:
        read_fsdp2([yaml(tmp_path, text)])
    assert part in str(caught.value) and "output_dir" not in str(caught.value)


def test_the_megatron_entry_has_the_references_defaults():
    job = read_megatron(LOAD)
    assert job is not None
    options = job.options
    assert tuple(options.task) == TASKS
    assert asked_of("greedy", options) == Asked(max_new_tokens=128, do_sample=False, num_beams=1)
    drawn = Asked(max_new_tokens=128, do_sample=True, temperature=0.7, top_p=0.95, top_k=50, num_beams=1)
    assert asked_of("chat", options) == asked_of("do_sample", options) == drawn
    assert asked_of("beam_search", options) == Asked(max_new_tokens=128, do_sample=False, num_beams=4)
    assert options.history_turns == 3


def test_megatrons_own_options_are_taken_with_a_line():
    words = "--num-layers 28 --bf16 --swiglu --micro-batch-size 1 --norm-epsilon=1e-6 --seed 5".split()
    job = read_megatron([*LOAD, *words, "--pipeline-model-parallel-size", "1"])
    assert job is not None
    assert (job.choice.dtype, job.said.shape, job.options.seed) == ("bf16", {"--num-layers": 28}, 5)
    assert job.said.lines == (
        "as the model's config.json says it: --num-layers --norm-epsilon",
        "without effect here: --swiglu --micro-batch-size",
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--pipeline-model-parallel-size 2 --lora-load x", ["--pipeline-model-parallel-size: ", "--lora-"]),
        ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2 with 1 rank(s)"]),
        ("--num-layers", ["--num-layers needs a value"]),
        ("--num-layers x", ["--num-layers x: a whole number"]),
        ("--bf16 --fp16", ["--bf16 and --fp16"]),
        ("--max-new-token 5", ["did you mean --max-new-tokens?"]),
        ("--max-new-tokens 0", ["'0' is not a whole number from 1 on"]),
        ("--task sing", ["invalid choice: 'sing'"]),
        ("--hf-chat-template --prompt-type qwen3", ["--hf-chat-template and --prompt-type"]),
    ],
)  # fmt: skip
def test_what_the_megatron_entry_refuses(words, parts):
    with pytest.raises(UserError) as caught:
        read_megatron([*LOAD, *words.split()])
    assert all(part in str(caught.value) for part in parts)
