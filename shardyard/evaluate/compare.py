"""Are two models' scores different, or is it chance? The same samples are compared in pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import UserError
from shardyard.evaluate.results import RATIOS, aligned, samples_folder, values_of
from shardyard.evaluate.statistics import exp, mcnemar, mean_and_error, ratio_and_error, student_p

LEVEL = 0.05
"""Below this p value a difference is called significant."""


@dataclass(frozen=True)
class Difference:
    """One metric of one task: B - A, the standard error of the paired difference, and the test's p value."""

    task: str
    metric: str
    first: float
    second: float
    difference: float
    error: float | None
    p: float | None
    test: str
    samples: int

    @property
    def verdict(self) -> str:
        if self.p is None:
            return "cannot tell"
        return "significant" if self.p < LEVEL else "not significant"


def compare(first: Path, second: Path) -> list[Difference]:
    """Every metric of every task that both results hold.

    Raises:
        UserError: one is not there, they share no task, or were not made on the same samples.
    """
    tasks_a, tasks_b = _read(first), _read(second)
    shared = [name for name in tasks_a if name in tasks_b and (tasks_a[name] or tasks_b[name])]
    if not shared:
        raise UserError(
            f"--compare: {first} has {', '.join(tasks_a)}, and {second} has {', '.join(tasks_b)}: no task "
            "is in both"
        )
    found = []
    for name in shared:
        samples_a, samples_b = tasks_a[name], tasks_b[name]
        _same_samples(name, samples_a, samples_b)
        metrics = [m for m in samples_a[0]["metrics"] if _has(samples_a, m) and _has(samples_b, m)]
        found += [
            difference_of(name, metric, values_of(samples_a, metric), values_of(samples_b, metric))
            for metric in metrics
        ]
    return [*found, *_of_groups(first, tasks_a, tasks_b)]


def difference_of(task: str, metric: str, first: Sequence[Any], second: Sequence[Any]) -> Difference:
    """The paired difference of two lists of a metric's values: McNemar's exact test for 0 and 1, else
    Student's t of the differences; of (log-likelihood, words) that of the log-likelihood per word.
    """
    if metric in RATIOS:
        return _difference_of_ratios(task, metric, first, second)
    a, b = [float(value) for value in first], [float(value) for value in second]
    differences = [y - x for x, y in zip(a, b, strict=True)]
    mean, error = mean_and_error(differences)
    if all(value in (0.0, 1.0) for value in (*a, *b)):
        p = mcnemar(differences.count(-1.0), differences.count(1.0))
        test = "McNemar"
    else:
        p, test = _student(mean, error, len(a)), "paired t"
    return Difference(task, metric, mean_and_error(a)[0], mean_and_error(b)[0], mean, error, p, test, len(a))


def _student(mean: float, error: float | None, count: int) -> float | None:
    if error is None or not math.isfinite(mean) or not math.isfinite(error):
        return None
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return student_p(mean / error, count - 1)


def _difference_of_ratios(task: str, metric: str, first: Sequence[Any], second: Sequence[Any]) -> Difference:
    weights = [float(weight) for _, weight in first]
    ratio, error = ratio_and_error(
        [(float(y[0]) - float(x[0]), w) for x, y, w in zip(first, second, weights, strict=True)]
    )
    p = _student(ratio, error, len(weights))
    values = [_ratio_metric(metric, ratio_and_error(pairs)[0]) for pairs in (first, second)]
    scale = values[1] if metric != "bits_per_byte" else 1 / math.log(2)
    return Difference(task, metric, values[0], values[1], values[1] - values[0],
                      error and error * scale, p, "paired t", len(weights))  # fmt: skip


def _ratio_metric(metric: str, ratio: float) -> float:
    return -ratio / math.log(2) if metric == "bits_per_byte" else exp(-ratio)


def _of_groups(path: Path, tasks_a: Mapping[str, list], tasks_b: Mapping[str, list]) -> list[Difference]:
    """The groups of the first results all of whose tasks are in both, samples pooled."""
    groups = []
    for name, task in _json(_file(path))["tasks"].items():
        members = task.get("members", [])
        if not members or not all(member in tasks_a and member in tasks_b for member in members):
            continue
        for metric in task["scores"]:
            if all(_has(tasks[member], metric) for member in members for tasks in (tasks_a, tasks_b)):
                pools = [
                    [value for member in members for value in values_of(tasks[member], metric)]
                    for tasks in (tasks_a, tasks_b)
                ]
                groups.append(difference_of(name, metric, *pools))
    return groups


def _has(samples: list[dict[str, Any]], metric: str) -> bool:
    """Whether every sample has a number for the metric, or a pair of one that is a ratio."""
    values = [sample["metrics"].get(metric) for sample in samples]
    if metric in RATIOS:
        return all(isinstance(value, list) and len(value) == 2 for value in values)
    return all(isinstance(value, bool | int | float) for value in values)


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Task -> samples of the results at ``path``."""
    file = _file(path)
    told, found = _json(file), {}
    for name, task in told.get("tasks", {}).items():
        if task.get("members"):
            continue
        samples = samples_folder(file) / f"{name.replace('/', '_')}.jsonl"
        try:
            lines = samples.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--compare {path}: the samples of {name} cannot be read: {error}") from error
        found[name] = [_parsed(line, f"{samples}:{number}") for number, line in enumerate(lines, 1) if line]
    if not any(found.values()):
        raise UserError(f"--compare {path}: no task with samples in it; was it written by --tasks --output?")
    return found


def _file(path: Path) -> Path:
    """The results' file: itself, or the only one in a folder."""
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if len(files) != 1:
            raise UserError(f"--compare {path}: {len(files)} .json files in that folder; name one")
        return files[0]
    if not path.is_file():
        raise UserError(f"--compare {path}: no such file")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--compare {path}: no results: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("tasks"), dict):
        raise UserError(
            f"--compare {path}: no results of tasks in it; name what `evaluate --tasks ... --output` wrote"
        )
    for name, task in told["tasks"].items():
        is_task = isinstance(task, dict) and isinstance(task.get("scores"), dict)
        if not is_task or not isinstance(task.get("members", []), list):
            raise UserError(f"--compare {path}: tasks.{name} is no result of a task")
    return told


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        sample = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON: {error}") from error
    if (
        not isinstance(sample, dict)
        or not {"doc_id", "doc_hash", "metrics"} <= sample.keys()
        or (not isinstance(sample["metrics"], dict))
    ):
        raise UserError(f"{where}: no sample of a task")
    return sample


def _same_samples(name: str, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Refuse samples that are not the same rows in the same order."""
    keys = [[(one["doc_id"], one["doc_hash"]) for one in samples] for samples in (first, second)]
    if keys[0] == keys[1]:
        return
    if len(first) != len(second):
        raise UserError(
            f"--compare: {name} has {len(first)} samples in one and {len(second)} in the other; score both "
            "with the same --max-eval-samples"
        )
    at = next(number for number, (a, b) in enumerate(zip(*keys, strict=True)) if a != b)
    raise UserError(
        f"--compare: sample {at + 1} of {name} is not the same row in both; score both on the same data"
    )


def compared_lines(found: Sequence[Difference]) -> list[str]:
    """The table."""
    rows = [("task", "metric", "A", "B", "B - A", "std error", "p", "samples", "test", "verdict")]
    for one in found:
        rows.append(
            (
                one.task,
                one.metric,
                f"{one.first:.4f}",
                f"{one.second:.4f}",
                f"{one.difference:+.4f}",
                "-" if one.error is None else f"{one.error:.4f}",
                "-" if one.p is None else f"{one.p:.4f}",
                str(one.samples),
                one.test,
                one.verdict,
            )
        )
    return aligned(rows)
