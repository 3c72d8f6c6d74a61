"""The verb evaluate on a run: its validation's loss, by a plain loop, and what is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from support.ranks import RankPool
from support.whole_runs import metrics, train, write_numbered, write_workspace

from shardyard.cli.evaluate import read_evaluate, take_settings
from shardyard.errors import UserError

EXPORT = ("--training.save_hf_weights", "true", "--training.export_dtype", "bf16")


def evaluated(folder: Path, words: list[str]) -> int:
    """A rank's job: the verb with ``words``."""
    from shardyard.cli.evaluate import run_evaluate

    os.chdir(folder)
    job = read_evaluate(words)
    assert job is not None
    return run_evaluate(job)


def scores(ranks: RankPool, folder: Path, *words: str, world: int = 1) -> dict[str, Any]:
    output = folder / "scores.json"
    output.unlink(missing_ok=True)
    ranks.run(world, evaluated, folder, [*words, "--output", str(output)], init_process_group=False)
    return json.loads(output.read_text())["sets"]


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose export is narrower than its checkpoint, with a validation at its end."""
    folder = write_workspace(tmp_path_factory.mktemp("loss"))
    write_numbered(folder / "rows.jsonl", range(8))
    write_numbered(folder / "held.jsonl", range(30, 37))
    held = str(folder / "held.jsonl")
    train(ranks, folder, "run", *EXPORT, "--data.eval_dataset", held, "--training.num_train_epochs", "1")
    return folder


@pytest.mark.parametrize("world", [1, 2])
def test_of_a_run_it_is_the_loss_of_its_last_validation(ranks: RankPool, folder: Path, world: int) -> None:
    (wanted,) = [line["eval"]["validation"] for line in metrics(folder, "run") if "eval" in line]
    ((_, found),) = scores(ranks, folder, "--model", str(folder / "run"), world=world).items()
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12 if world == 1 else 1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert (found["labelled_tokens"], found["rows"]) == (wanted["labelled"], 7)
    # One token is a byte; the last label of each row is the end of the turn, which is no text.
    assert found["bytes"] == wanted["labelled"] - 7
    bits = wanted["loss"] * wanted["labelled"] / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_other_data_and_the_runs_own_metrics(ranks: RankPool, folder: Path) -> None:
    before = len(metrics(folder, "run"))
    words = ("--model", str(folder / "run"), "--data", str(folder / "rows.jsonl"), str(folder / "held.jsonl"))
    found = scores(ranks, folder, *words, "--into-metrics")
    assert [one["rows"] for one in found.values()] == [8, 7, 15] and list(found)[-1] == "all"
    (line,) = metrics(folder, "run")[before:]
    assert line["step"] == 8 and line["eval"]["all"]["loss"] == pytest.approx(found["all"]["loss"])


def test_text_by_a_folder_that_is_no_run(ranks: RankPool, folder: Path) -> None:
    """The export, asked for the loss of plain text: every token after the first of a text is labelled."""
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": "é语 plain text"}) + "\n", encoding="utf-8")
    copied = folder / "exported"
    copied.mkdir()
    for file in (folder / "run").iterdir():
        if file.is_file() and file.name not in ("resolved_config.yaml", "metrics.jsonl"):
            (copied / file.name).write_bytes(file.read_bytes())
    ((_, found),) = scores(ranks, folder, "--model", str(copied), "--data", str(text)).items()
    size = len("é语 plain text".encode())
    assert found["rows"] == 1 and size - 1 <= found["bytes"] <= size
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] * found["labelled_tokens"] / math.log(2) / found["bytes"]
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "say which model with --model PATH, or name a CONFIG.yaml"),
        (["a.yaml", "--data", "b.yaml"], "two YAML files, a.yaml and b.yaml"),
        (["rows.jsonl", "--model", "m"], "a data set is named by --data"),
        (
            ["--tasks", "boolq", "--data.cutoff_len", "5", "--model", "m"],
            "--tasks: benchmarks read no data set",
        ),
        (["a.yaml", "--template", "chatml"], "--template is of --model PATH"),
        (["--model", "m/", "--parallel", "tp"], "--parallel.tp_size N"),
        (["--modle", "m"], "did you mean --model?"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, text):
    with pytest.raises(UserError) as caught:
        read_evaluate(words)
    assert text in str(caught.value)


def test_settings_are_told_from_options():
    words = ["--model", "m", "--data.eval_dataset", "a", "b", "--data", "x", "training.seed=3", "c.yaml"]
    own, settings = take_settings(words)
    assert own == ["--model", "m", "--data", "x", "c.yaml"]
    assert settings == ["--data.eval_dataset", "a", "b", "training.seed=3"]


def test_a_set_without_a_row_or_a_label_is_a_fault(ranks: RankPool, folder: Path) -> None:
    from support.ranks import RankFailure

    empty = folder / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(RankFailure) as caught:
        scores(ranks, folder, "--model", str(folder / "run"), "--data", str(empty))
    assert isinstance(caught.value.cause, UserError) and "empty.jsonl" in str(caught.value.cause)
