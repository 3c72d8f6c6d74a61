"""What of ``evaluation`` cannot work."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from shardyard.config.schema import SECTIONS

if TYPE_CHECKING:
    from shardyard.config.rules import Checked

BY_LIKELIHOOD = ("mmlu", "mmlu_ppl", "cmmlu", "ceval", "boolq", "hellaswag")
"""The benchmarks that need no generation."""
_BY_GENERATION = ("gsm8k", "bbh", "agieval", "human_eval", "humaneval", "needlebench")


def check_evaluation(checked: Checked) -> None:
    """Names, and settings that need one another."""
    evaluation = checked.config.evaluation
    tasks = evaluation.tasks or ()
    path = "evaluation.tasks"
    if not tasks:
        for key in SECTIONS["evaluation"].model_fields:
            if key != "tasks" and checked.changed(f"evaluation.{key}"):
                checked.warn(f"evaluation.{key}", "has no effect without evaluation.tasks")
        return
    for name in tasks:
        if name in _BY_GENERATION:
            text = "its answers are generated, which needs the trained model: `shardyard evaluate --tasks`"
            checked.fault((path,), f"{name} is refused: {text}")
        elif name not in BY_LIKELIHOOD:
            near = get_close_matches(name, BY_LIKELIHOOD, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BY_LIKELIHOOD)}"
            checked.fault((path,), f"{name} is unknown; {hint}")
    if len(set(tasks)) < len(tasks):
        checked.fault((path,), "one name stands there twice; keep one")
    if evaluation.task_data_path is None:
        checked.fault(
            ("evaluation.task_data_path", path),
            "evaluation.tasks needs evaluation.task_data_path, the folder of the tasks' files",
        )
    if evaluation.every is None and not (evaluation.at_start or evaluation.at_end):
        checked.fault(
            ("evaluation.at_end", "evaluation.every"),
            "no time is left to ask the tasks at; set evaluation.every, at_start or at_end",
        )
