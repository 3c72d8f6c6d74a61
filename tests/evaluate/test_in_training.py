"""Benchmarks during training: their scores are those of the export, and training goes on as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import add_lm_eval, ours, write_mmlu
from support.ranks import RankPool
from support.whole_runs import metrics, rank_of_run, write_numbered, write_workspace

TASKS = ("--evaluation.tasks", "mmlu", "--evaluation.every", "2", "--evaluation.num_fewshot", "1")
RUN = ("--training.num_train_epochs", "1", "--training.save_hf_weights", "true")


def with_lm_eval(folder: Path, out: str, leg: str, words: list[str]) -> int:
    add_lm_eval()
    return rank_of_run(folder, out, leg, words, None)


def train(ranks: RankPool, folder: Path, out: str, *words: str, world: int = 2) -> list[dict[str, Any]]:
    ranks.run(
        world, with_lm_eval, folder, out, "only", [*RUN, *words], init_process_group=False, timeout_s=300
    )
    return metrics(folder, out)


def steps_of(lines: list[dict[str, Any]], after: int = 0) -> list[tuple[Any, ...]]:
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in lines
        if "loss" in line and line["step"] > after
    ]


def scores_of(lines: list[dict[str, Any]], after: int = -1) -> list[tuple[int, Any]]:
    return [
        (line["step"], line["benchmarks"]) for line in lines if "benchmarks" in line and line["step"] > after
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("in_training"))
    write_numbered(folder / "rows.jsonl", range(8))
    write_mmlu(folder / "mmlu", rows=3)
    return folder


def test_training_goes_on_as_if_nothing_had_been_asked(ranks: RankPool, folder: Path) -> None:
    data = ("--evaluation.task_data_path", str(folder / "mmlu"))
    plain = train(ranks, folder, "plain")
    asked = train(ranks, folder, "asked", *TASKS, *data, "--evaluation.at_start", "true")
    assert steps_of(asked) == steps_of(plain) and len(steps_of(plain)) == 4
    assert [step for step, _ in scores_of(asked)] == [0, 2, 4]
    weights = [(folder / out / "model.safetensors").read_bytes() for out in ("plain", "asked")]
    assert weights[0] == weights[1]

    before = folder / "asked" / "checkpoints" / "global_step_2"
    rest = train(ranks, folder, "rest", *TASKS, *data, "--training.resume_from_checkpoint", str(before))
    assert steps_of(rest) == steps_of(plain, after=2)
    assert scores_of(rest) == scores_of(asked, after=2)

    wanted = {
        "tasks": ("mmlu",), "data": {"": folder / "mmlu"}, "num_fewshot": 1, "chat": False,
    }  # fmt: skip
    judge = ranks.run(1, ours, folder / "asked", wanted, init_process_group=False)[0]
    last = scores_of(asked)[-1][1]
    assert {name: scores["acc"] for name, scores in last.items()} == {
        name: pytest.approx(task["scores"]["acc"]["value"]) for name, task in judge["tasks"].items()
    }


def test_data_that_is_missing_is_told_before_the_first_step(ranks: RankPool, folder: Path) -> None:
    from support.ranks import RankFailure

    with pytest.raises(RankFailure) as caught:
        train(ranks, folder, "nowhere", *TASKS, "--evaluation.task_data_path", str(folder / "none"))
    told = {str(cause) for cause in caught.value.causes.values()}
    assert told == {f"evaluation.task_data_path {folder / 'none'}: no such folder"}
    assert not (folder / "nowhere").exists()
