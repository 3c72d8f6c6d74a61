"""What a benchmark's run gives: scores with their errors, each sample's answer, files and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.durable import temporary_name, write_durably
from shardyard.errors import UserError
from shardyard.evaluate.statistics import exp, mean_and_error, ratio_and_error

RATIOS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""Metrics of lm-eval whose samples are (log-likelihood, words or bytes)."""


@dataclass(frozen=True)
class Score:
    """``error``: standard error; None where there is no formula, or one sample."""

    value: float
    error: float | None
    samples: int
    higher_is_better: bool = True


@dataclass
class TaskResult:
    """One task, or a group of them, whose samples are pooled (``members``)."""

    name: str
    scores: dict[str, Score]
    num_fewshot: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)
    members: tuple[str, ...] = ()


@dataclass
class Results:
    """All tasks of a run; ``left_out``: rows that could not be scored, in words."""

    model: str
    settings: dict[str, Any]
    tasks: list[TaskResult]
    left_out: list[str]
    seconds: float = 0.0


def score_of(
    metric: str, values: Sequence[Any], stated: float | None = None, *, higher: bool = True
) -> Score:
    """The score of a metric's per-sample ``values``; ``stated`` is lm-eval's, for metrics of another form."""
    if metric in RATIOS and values and isinstance(values[0], list | tuple):
        ratio, error = ratio_and_error([(float(x), float(w)) for x, w in values])
        if metric == "bits_per_byte":
            return Score(-ratio / math.log(2), error and error / math.log(2), len(values), higher)
        value = exp(-ratio)
        return Score(value, error and value * error, len(values), higher)
    if all(isinstance(value, bool | int | float) for value in values):
        mean, error = mean_and_error([float(value) for value in values])
        if stated is None or math.isclose(mean, stated, rel_tol=1e-9, abs_tol=1e-12):
            return Score(mean, error, len(values), higher)
    return Score(math.nan if stated is None else float(stated), None, len(values), higher)


def pooled(name: str, members: Sequence[TaskResult]) -> TaskResult:
    """The group of tasks, every sample counted once, in the metrics that all its tasks have."""
    shared = [metric for metric in members[0].scores if all(metric in task.scores for task in members)]
    scores = {}
    for metric in shared:
        values = [value for task in members for value in values_of(task.samples, metric)]
        scores[metric] = score_of(metric, values, higher=members[0].scores[metric].higher_is_better)
    return TaskResult(name, scores, members[0].num_fewshot, members=tuple(task.name for task in members))


def values_of(samples: Iterable[Mapping[str, Any]], metric: str) -> list[Any]:
    """A metric's value of each sample."""
    return [sample["metrics"][metric] for sample in samples]


def table(results: Results) -> list[str]:
    """Task, metric, score, error, samples: a line each, groups before their members."""
    rows = [("task", "metric", "score", "std error", "samples", "examples")]
    for task in results.tasks:
        indent = "" if task.members or not _is_member(task, results) else "  "
        for metric, score in task.scores.items():
            error = "-" if score.error is None else f"{score.error:.4f}"
            rows.append((indent + task.name, metric, f"{score.value:.4f}", error, str(score.samples),
                         str(task.num_fewshot)))  # fmt: skip
    return [*aligned(rows), *results.left_out]


def _is_member(task: TaskResult, results: Results) -> bool:
    return any(task.name in other.members for other in results.tasks)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines; the first two columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def metrics_of(results: Results) -> dict[str, dict[str, float]]:
    """For metrics.jsonl: task -> metric -> score."""
    return {
        task.name: {metric: score.value for metric, score in task.scores.items()} for task in results.tasks
    }


def samples_folder(path: Path) -> Path:
    """Where the samples of the results in ``path`` lie: beside it."""
    return path.with_name(f"{path.stem}_samples")


def as_json(results: Results) -> dict[str, Any]:
    """The form of the file."""
    return {
        "model": results.model,
        "settings": results.settings,
        "seconds": round(results.seconds, 3),
        "left_out": results.left_out,
        "tasks": {
            task.name: {
                "num_fewshot": task.num_fewshot,
                **({"members": list(task.members)} if task.members else {}),
                "scores": {
                    metric: {
                        "value": _number(score.value),
                        "std_error": _number(score.error),
                        "samples": score.samples,
                        "higher_is_better": score.higher_is_better,
                    }
                    for metric, score in task.scores.items()
                },
            }
            for task in results.tasks
        },
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def check_output(path: Path) -> None:
    """Raise a UserError, before any work, if results cannot be written to ``path``."""
    if path.suffix != ".json":
        raise UserError(f"--output {path}: the name of the results' file ends in .json")
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "that is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UserError(f"--output {path}: {what}")


def write_results(results: Results, path: Path) -> None:
    """The results, and beside them a folder with each task's samples, a line each; each file complete or
    absent.

    Raises:
        UserError: they cannot be written.
    """
    folder = samples_folder(path)
    try:
        folder.mkdir(exist_ok=True)
        for task in results.tasks:
            if task.samples:
                lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in task.samples]
                _write(folder / f"{task.name.replace('/', '_')}.jsonl", "".join(lines))
        _write(path, json.dumps(as_json(results), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:  # a full disk, a folder that may not be written to
        raise UserError(f"--output {path}: the results cannot be written: {error}") from error


def _write(path: Path, text: str) -> None:
    temporary = temporary_name(path)
    try:
        write_durably(temporary, text.encode("utf-8", "backslashreplace").decode())  # rows hold surrogates
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
