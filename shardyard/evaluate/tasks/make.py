"""From a benchmark's file and the rows of a local copy to tasks that lm-eval runs. Needs lm-eval."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

from shardyard.errors import UserError
from shardyard.evaluate.tasks.answers import METRICS, SCORERS
from shardyard.evaluate.tasks.catalog import Spec, changed
from shardyard.evaluate.tasks.copies import Part
from shardyard.evaluate.tasks.files import Row

logger = logging.getLogger("shardyard.evaluate")


class Rows(list[Row]):
    """What lm-eval asks of a split: rows, and the names of their columns."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0] if self else ())


class LocalTask(ConfigurableTask):
    """lm-eval's task over rows that are already here."""

    def __init__(self, config: dict[str, Any], splits: dict[str, Rows]) -> None:
        self._splits = splits
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        self.dataset = self._splits


def make_tasks(name: str, spec: Spec, parts: list[Part], num_fewshot: int | None) -> Iterator[LocalTask]:
    """A task for each part that has rows: ``name_subject``, or ``name`` where there is but one.

    Raises:
        UserError: no part has a row.
    """
    full = [part for part in parts if part.rows]
    if not full:
        left_out = sum(sum(part.skipped.values()) for part in parts)
        raise UserError(f"{name}: no row to score" + (f"; {left_out} were left out" if left_out else ""))
    for part in full:
        rows_of: dict[str, list[Row]] = {}
        for row in part.rows:
            rows_of.setdefault(row.get("kind", ""), []).append(row)
        for kind, rows in rows_of.items():
            task = name if part.subject == name and len(full) == 1 else f"{name}_{part.subject}"
            task = f"{task}_{kind}" if len(rows_of) > 1 else task
            own = changed(spec, spec["kinds"][kind]) if kind in spec.get("kinds", {}) else spec
            shots = [row for row in part.shots if row.get("kind", "") == kind]
            yield _task(task, own, rows, shots, num_fewshot)


def _task(task: str, spec: Spec, rows: list[Row], shots: list[Row], num_fewshot: int | None) -> LocalTask:
    asked = spec["num_fewshot"] if num_fewshot is None else num_fewshot
    shown = min(asked, len(shots))
    if shown < asked:
        logger.info("%s: %d examples are shown of %d; its files hold no more", task, shown, asked)
    config = {
        "fewshot_config": {"sampler": "first_n"},
        **copy.deepcopy(spec["config"]),
        "task": task,
        "test_split": "test",
        "num_fewshot": shown,
        "metadata": {"version": 1},
    }
    if shown:
        config["fewshot_split"] = "shots"
    if "scorer" in spec:
        metrics = METRICS[spec["scorer"]]
        config["metric_list"] = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
        ]
        config["process_results"] = _judge(spec["scorer"])
    return LocalTask(config, {"test": Rows(rows), "shots": Rows(shots)})


def _judge(scorer: str) -> Any:
    """The scorer as lm-eval calls it: with the list of a row's answers."""

    def process_results(doc: Row, results: list[str]) -> dict[str, float]:
        return SCORERS[scorer](doc, results[0])

    return process_results
