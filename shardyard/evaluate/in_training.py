"""Benchmarks of the model in training, on the ranks that train it, of which training notices nothing.

Rank 0 needs lm-eval and the data. Every answer is a choice by likelihood, so no cache of keys and values
and no other form of the model is needed, whatever the layout.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config import Config
from shardyard.data.templates import exported_chat_template
from shardyard.device import Device, ProcessGroup, agree
from shardyard.errors import UserError
from shardyard.evaluate.benchmarks import Benchmarks, read_parts, require_lm_eval, run_benchmarks
from shardyard.evaluate.crew import Crew, Prompt
from shardyard.evaluate.likelihood import Pair, Score, log_likelihoods
from shardyard.evaluate.results import Results, metrics_of, table
from shardyard.evaluate.tasks.copies import Part
from shardyard.evaluate.untouched import untouched
from shardyard.infer.opening import Choice

logger = logging.getLogger("shardyard.evaluate")
_LONGEST = 1 << 20
"""Context of a model that states none."""


@dataclass(frozen=True)
class _Trained:
    """What benchmarks ask of an opened model."""

    model: Any
    tokenizer: Any
    config: Any
    context_length: int
    device: Device
    choice: Choice
    name: str = "model in training"
    parallel: str = "trained"
    """All ranks compute every request together."""
    run: dict[str, Any] | None = None


class _TrainingCrew(Crew):
    """All ranks score all pairs, by the forward of the trainable model."""

    def __init__(self, trained: Any, group: ProcessGroup, *, packed: bool) -> None:
        super().__init__(trained, group, batch_size=8)
        self._packed = packed

    def _score(self, pairs: list[Pair]) -> list[Score]:
        return log_likelihoods(self._opened.model, pairs, group=self._group, packed=self._packed)

    def _generate(self, prompts: list[Prompt]) -> list[str]:
        raise UserError("evaluation.tasks: answers are generated after the training, by `shardyard evaluate`")


class BenchmarksInTraining:
    """The tasks of ``config.evaluation``; all ranks make and call it together.

    ``model`` is the trainable one; with ``packed`` false each document has a forward of its own.

    Raises:
        UserError: on every rank, where lm-eval or the data is missing or at fault.
    """

    def __init__(
        self, model: Any, tokenizer: Any, group: ProcessGroup, device: Device, config: Config, *, packed: bool
    ) -> None:
        self.settings, self._group, self._device = config.evaluation, group, device
        self._asked = _asked_of(config)
        self._parts: Mapping[str, list[Part]] = {}
        agree(group, "evaluation", self._look)
        tokenizer = copy.deepcopy(tokenizer)
        data = config.data
        if data.data_manager_type == "lf" and data.template:
            tokenizer.chat_template = exported_chat_template(
                data.template, enable_thinking=data.enable_thinking, default_system=data.default_system,
                tool_format=data.tool_format,
            )  # fmt: skip
        if self._asked.chat and not tokenizer.chat_template:
            raise UserError("evaluation.apply_chat_template: there is no chat template; set data.template")
        self._trained: Any = _Trained(
            model, tokenizer, model.config, _context_length(model.config), device,
            Choice("", enable_thinking=data.enable_thinking),
        )  # fmt: skip
        self._crew = _TrainingCrew(self._trained, group, packed=packed)

    def is_due(self, step: int) -> bool:
        """Whether the tasks are asked after update ``step``."""
        return bool(self.settings.every) and step % (self.settings.every or 1) == 0

    def ask(self) -> Results | None:
        """The scores, on rank 0. Nothing that training goes on with is changed."""
        with untouched(self._trained.model, self._device):
            return run_benchmarks(self._trained, self._group, self._asked, self._parts, crew=self._crew)

    def told(self, step: int, results: Results) -> tuple[dict[str, dict[str, float]], list[str]]:
        """The scores by task and metric for ``metrics.jsonl``, and lines for the log."""
        head = f"benchmarks at step {step} ({results.seconds:.1f} s):"
        return metrics_of(results), [head, *table(results)]

    def _look(self) -> str:
        """Read the data; on rank 0."""
        try:
            require_lm_eval()
            self._parts = read_parts(self._asked)
        except UserError as error:
            text = str(error).replace("--task-data-path", "evaluation.task_data_path")
            raise UserError(text.replace("--tasks", "evaluation.tasks")) from error
        return "read"


def _asked_of(config: Config) -> Benchmarks:
    wanted = config.evaluation
    return Benchmarks(
        tasks=tuple(wanted.tasks or ()),
        data={"": Path(wanted.task_data_path or "")},
        num_fewshot=wanted.num_fewshot,
        chat=bool(wanted.apply_chat_template),
        limit=wanted.limit,
    )


def _context_length(config: Any) -> int:
    stated = getattr(config.get_text_config(), "max_position_embeddings", None)
    return stated if isinstance(stated, int) and stated > 0 else _LONGEST
