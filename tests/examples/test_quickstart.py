"""The quick start's model, tokenizer and rows, and what `make train` ends with."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The quick start's modules, imported as its scripts import each other."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    return {name: importlib.import_module(name) for name in ("rows", "make_assets", "show")}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The assets as the script writes them, in a folder of the tests' own; read-only."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(QUICKSTART))
        assert importlib.import_module("make_assets").main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets / "model")


def test_rows_are_few_short_and_asked_once(assets: Path, tokenizer: Any) -> None:
    rows = pyarrow.parquet.read_table(assets / "alpaca.parquet").to_pylist()
    assert 100 <= len(rows) <= 150
    assert len({(row["instruction"], row["input"]) for row in rows}) == len(rows)
    for row in rows:
        user = f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]
        text = (
            f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
            f"<think>\n\n</think>\n\n{row['output']}<|im_end|>\n"
        )
        ids = tokenizer(text)["input_ids"]
        assert len(ids) <= 60
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_and_as_qwen_uses_them(assets: Path, tokenizer: Any) -> None:
    markup = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for token in markup + special:
        assert len(tokenizer(token)["input_ids"]) == 1
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    both = tokenizer("<think>a</think><|im_end|>")["input_ids"]
    assert tokenizer.decode(both, skip_special_tokens=True) == "<think>a</think>"
    config = json.loads((assets / "model/config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3" and config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tokenizer)


def test_the_chat_template_writes_every_kind_of_turn(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}, {"type": "function"}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "<think>\nw\n</think>\n\nR"},
        {"role": "user", "content": "again"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    one_call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text == (
        "<|im_start|>system\nS\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add"}}\n{"type": "function"}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nQ<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{one_call}\n{one_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n"
        "<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nw\n</think>\n\nR<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_assets_are_the_same_every_time_kept_while_whole_and_rebuilt_when_not(
    scripts: dict[str, ModuleType], assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, again = scripts["make_assets"].main, tmp_path / "assets"
    main([str(again)])
    for name in ("model/model.safetensors", "model/tokenizer.json", "alpaca.parquet"):
        assert (again / name).read_bytes() == (assets / name).read_bytes()
    weights = again / "model/model.safetensors"
    inode = weights.stat().st_ino
    main([str(again)])
    assert weights.stat().st_ino == inode and "up to date" in capsys.readouterr().out
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    main([str(again)])
    assert weights.read_bytes() == (assets / "model/model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


@pytest.fixture
def run_folder(assets: Path, tmp_path: Path) -> Path:
    """What a run leaves: the export (here untrained) and the numbers of three steps."""
    for file in (assets / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    records = [{"step": step, "loss": loss, "lr": 1e-3} for step, loss in ((1, 7.0), (2, 3.0), (3, 0.25))]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def test_show_fails_on_a_wrong_answer_and_says_what_the_row_says(
    scripts: dict[str, ModuleType], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts["show"].main([str(run_folder), "--questions", "2"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG, the row says: ") == 2 and "0 of 2 answers are right" in out


def test_show_draws_the_loss_and_asks_other_rows_for_another_seed(
    scripts: dict[str, ModuleType], run_folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows, show = scripts["rows"], scripts["show"]
    right = {rows.question(row): row["output"] for row in rows.alpaca_rows()}
    monkeypatch.setattr(show, "generate", lambda model, tokenizer, question: right[question])
    printed = []
    for seed in ("0", "0", "1"):
        assert show.main([str(run_folder), "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert "7.000 at step 1 -> 0.250 at step 3" in printed[0]
    assert f"{run_folder}/loss.png" in printed[0] and "3 of 3 answers are right" in printed[0]
    assert (run_folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_show_fails_when_the_loss_has_not_fallen_or_the_answer_has_a_space_too_many(
    scripts: dict[str, ModuleType], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, show = scripts["rows"], scripts["show"]
    right = {rows.question(row): row["output"] for row in rows.alpaca_rows()}
    monkeypatch.setattr(show, "generate", lambda model, tokenizer, question: right[question] + " ")
    assert show.main([str(run_folder)]) == 1
    monkeypatch.setattr(show, "generate", lambda model, tokenizer, question: right[question])
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 2}\n', "utf-8")
    assert show.main([str(run_folder)]) == 1


def test_show_of_no_run_names_the_missing_file(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"metrics\.jsonl is missing"):
        scripts["show"].main([str(tmp_path)])


@pytest.mark.soak
def test_the_run_learns_every_row_by_heart(assets: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train_fsdp2.py"]
    settings = {
        "model.model_name_or_path": assets / "model",
        "data.dataset": assets / "alpaca.parquet",
        "model.cache_dir": tmp_path / "cache",
        "training.output_dir": run,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(
        [*torchrun, str(QUICKSTART / "tune_tiny_qwen3.yaml"), *words],
        cwd=REPOSITORY,
        env=environment,
        check=True,
    )
    show = [sys.executable, str(QUICKSTART / "show.py"), str(run), "--questions", "150"]
    done = subprocess.run(show, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "132 of 132 answers are right" in done.stdout, done.stdout + done.stderr
