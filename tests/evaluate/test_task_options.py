"""Options of benchmarks: `shardyard evaluate --tasks` and the reference's evaluation.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import LM_EVAL

from shardyard.cli import evaluate_tasks
from shardyard.cli.evaluate_tasks import TaskJob, add_task_options, is_about_tasks, read_tasks
from shardyard.cli.evaluation_reference import main, read
from shardyard.cli.inference_options import add_model_options, parse_verb, verb_parser
from shardyard.errors import UserError


@pytest.fixture(autouse=True)
def _with_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LM_EVAL))


def _read(*words: str) -> TaskJob:
    parser = verb_parser("evaluate", "")
    add_model_options(parser, required=False)
    add_task_options(parser, output=True)
    options = parse_verb(parser, words)
    assert options is not None and is_about_tasks(options)
    return read_tasks(options)


def test_options_reach_the_job(tmp_path: Path) -> None:
    job = _read(
        "--model", "m", "--tasks", "mmlu,gsm8k", "boolq", "--task-data-path", "a", "--task-data-path",
        "gsm8k=b/c", "--num-fewshot", "0", "--chain-of-thought", "--no-chat-template", "--max-eval-samples",
        "0.5", "--evaluation-batch-size", "3", "--eval-language", "zh", "--temperature", "0.5", "--top-p",
        "0.9", "--max-new-tokens", "7", "--task-seed", "5", "--output", str(tmp_path / "r.json"),
    )  # fmt: skip
    asked = job.asked
    assert asked.tasks == ("mmlu", "gsm8k", "boolq")
    assert asked.data == {"": Path("a"), "gsm8k": Path("b/c")}
    assert (asked.num_fewshot, asked.variant, asked.chat, asked.limit) == (0, "chain_of_thought", False, 0.5)
    assert (asked.batch_size, asked.language, asked.seed) == (3, "zh", 5)
    assert asked.generation == {"max_gen_toks": 7, "temperature": 0.5, "top_p": 0.9, "do_sample": True}
    assert not asked.allow_code and job.output == tmp_path / "r.json"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks", "mmlu"], "say which model"),
        (["--model", "m", "--tasks", ","], "--tasks: name some of mmlu"),
        (["--model", "m", "--tasks", "a", "--chain-of-thought", "--alternative-prompt"], "leave one"),
        (["--model", "m", "--tasks", "a", "--max-eval-samples", "0"], "no number of rows"),
        (["--model", "m", "--tasks", "a", "--max-eval-samples", "1.5"], "no number of rows"),
        (["--model", "m", "--tasks", "a", "--task-data-path", "x", "--task-data-path", "y"], "given twice"),
        (["--model", "m", "--tasks", "a", "--output", "x.txt"], r"--output x\.txt: the name"),
        (["--model", "m", "--tasks", "a", "--output", "/no/x.json"], "there is no folder /no"),
        (["--model", "m", "--num-fewshot", "3"], "--num-fewshot: it is of benchmarks"),
        (["--model", "m", "--tasks", "a", "--num-fewshots", "3"], "did you mean --num-fewshot"),
    ],
)
def test_wrong_options_are_named(words: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        _read(*words)


def test_without_lm_eval_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    with pytest.raises(UserError, match=r"pip install 'shardyard\[evaluate\]'"):
        _read("--model", "m", "--tasks", "mmlu")


def test_the_references_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = read(
        [
            "--task", "ceval", "--task-data-path", "data/ceval", "--load", "mcore",
            "--tokenizer-name-or-path", str(tmp_path), "--num-layers", "32", "--hidden-size", "4096",
            "--use-mcore-models", "--bf16",
            "--tensor-model-parallel-size", "2", "--max-length", "4096", "--max-new-tokens", "1",
            "--evaluation-batch-size", "4", "--no-chat-template", "--broadcast", "--micro-batch-size", "1",
            "--instruction-template", "{fewshot_template}\n{question}", "--seed", "42",
        ]
    )  # fmt: skip
    assert job is not None
    assert (job.choice.model, job.choice.config, job.choice.dtype) == ("mcore", str(tmp_path), "bf16")
    assert job.choice.parallel == "tp"
    assert job.asked.tasks == ("ceval",) and job.asked.data == {"": Path("data/ceval")}
    assert (job.asked.batch_size, job.asked.chat, job.asked.max_length) == (4, False, 4096)
    told = capsys.readouterr().err
    assert "--num-layers --hidden-size" in told and "--use-mcore-models --micro-batch-size" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--load"),
        (["--load", "m"], "--task: name what is asked"),
        (["--load", "m", "--task", "mmlu", "--lora-load", "x"], "--lora-load: merge the adapter"),
        (["--load", "m", "--task", "mmlu", "--instruction-template", "{question}"], "--task-path"),
        (["--load", "m", "--task", "a", "b", "c", "--task-data-path", "x", "y"], "2 folders for 3 tasks"),
        (["--load", "m", "--task", "mmlu", "--top-p", "0.5"], "say --temperature too"),
        (["--load", "m", "--task", "mmlu", "--tusk", "0.5"], "no option --tusk; did you mean --task"),
    ],
)
def test_the_references_script_names_what_is_wrong(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_options_are_read_without_torch() -> None:
    import subprocess

    modules = f"{evaluate_tasks.__name__}, shardyard.cli.evaluation_reference"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
