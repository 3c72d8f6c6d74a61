"""Turns the records of a run into log lines and ``metrics.jsonl``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardyard.monitor.metrics import METRICS_FILE, MetricsWriter, cut_after
from shardyard.monitor.record import CpuMemory, StepRecord, format_log_line
from shardyard.monitor.validation import EvalResult, format_validation

logger = logging.getLogger("shardyard.monitor")


@dataclass(frozen=True)
class _Step:
    """What an interval averages."""

    loss: float
    mtp_loss: float
    aux_loss: float | None
    step_ms: float
    tokens: int


class Monitor:
    """Prints a line every ``logging_steps`` and after the last step; writes every step to ``metrics.jsonl``.

    Losses and times of the line are plain means over the interval's steps (a NaN among them makes the mean
    NaN); learning rate and gradient norm are those of its last step. All of it happens on global rank 0
    (``is_main``) only.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        logging_steps: int,
        log_throughput: bool = False,
        log_cpu_memory: bool = False,
        is_main: bool = True,
        resume_step: int = 0,
        evaluated_step: int | None = None,
    ) -> None:
        """``resume_step`` is the last step already done: later ones are cut from ``metrics.jsonl``, and the
        validations after ``evaluated_step`` (None: after ``resume_step``).
        """
        self._logging_steps = max(logging_steps, 1)
        self._log_throughput, self._log_cpu_memory = log_throughput, log_cpu_memory
        self._interval: list[_Step] = []
        self._last: StepRecord | None = None
        self._writer: MetricsWriter | None = None
        if is_main:
            path = output_dir / METRICS_FILE
            self._reopen_interval(cut_after(path, resume_step, evaluated_step=evaluated_step), resume_step)
            self._writer = MetricsWriter(path)

    def record(self, record: StepRecord) -> None:
        """Take in one finished step."""
        if self._writer is None:
            return
        self._writer.write(record)
        self._interval.append(
            _Step(record.loss, record.mtp_loss, record.aux_loss, record.step_ms, record.tokens)
        )
        if record.step % self._logging_steps == 0 or record.step == record.total_steps:
            logger.info(self._line(record))
            self._interval.clear()
        self._last = record

    def record_validation(self, step: int, result: EvalResult) -> None:
        """Take in a validation after ``step`` updates."""
        if self._writer is None:
            return
        self._writer.write_validation(step, result)
        for line in format_validation(step, result):
            logger.info(line)

    def record_benchmarks(
        self, step: int, scores: Mapping[str, Mapping[str, float]], lines: Sequence[str]
    ) -> None:
        """Take in benchmarks after ``step`` updates: the scores by name, and what the log says."""
        if self._writer is None:
            return
        self._writer.write_benchmarks(step, scores)
        for line in lines:
            logger.info(line)

    def end_early(self) -> None:
        """Print the line of an interval that no further step will complete."""
        if self._last is not None and self._interval:
            logger.info(self._line(self._last))
            self._interval.clear()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _reopen_interval(self, done: list[dict], resume_step: int) -> None:
        """Put the steps of an unfinished interval back, so that its line is that of an unbroken run."""
        start = resume_step - resume_step % self._logging_steps
        for values in done:
            if values["step"] > start:
                self._interval.append(
                    _Step(
                        values["loss"],
                        values["mtp_loss"],
                        values.get("aux_loss"),
                        values["step_ms"],
                        values["tokens"],
                    )
                )

    def _line(self, record: StepRecord) -> str:
        steps = self._interval
        step_ms = _mean([step.step_ms for step in steps])
        aux_losses = [step.aux_loss for step in steps if step.aux_loss is not None]
        means = replace(
            record,
            loss=_mean([step.loss for step in steps]),
            mtp_loss=_mean([step.mtp_loss for step in steps]),
            aux_loss=_mean(aux_losses) if aux_losses else None,
            step_ms=step_ms,
        )
        tokens_per_second = None
        if self._log_throughput and step_ms > 0:
            tokens_per_second = sum(step.tokens for step in steps) / (step_ms * len(steps) / 1000.0)
        return format_log_line(
            means,
            tokens_per_second=tokens_per_second,
            cpu_memory=_cpu_memory() if self._log_cpu_memory else None,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _cpu_memory() -> CpuMemory:
    import psutil

    memory = psutil.virtual_memory()
    return CpuMemory(memory.used, memory.available, memory.percent)
