"""``metrics.jsonl``: one JSON object a step and one a validation, each once, also after a resume.

The object of a validation has the key ``eval``, one of benchmarks ``benchmarks``; that of a step has neither.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardyard.errors import UserError
from shardyard.monitor.record import StepRecord
from shardyard.monitor.validation import EvalResult, validation_metrics

METRICS_FILE = "metrics.jsonl"
_EVAL, _BENCHMARKS = "eval", "benchmarks"

logger = logging.getLogger("shardyard.monitor")


def metrics_of(record: StepRecord) -> dict[str, Any]:
    """What is written for ``record``: counts, losses per token, milliseconds, bytes.

    JSON knows no NaN and no infinity: in the file such a number is the string "nan", "inf" or "-inf".
    """
    values: dict[str, Any] = {
        "step": record.step,
        "total_steps": record.total_steps,
        "epoch": record.epoch,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "tokens": record.tokens,
        "samples": record.global_batch_size,
        "step_ms": record.step_ms,
        "memory": record.memory_allocated_bytes,
        "memory_reserved": record.memory_reserved_bytes,
        "consumed_samples": record.consumed_samples,
        "consumed_tokens": record.consumed_tokens,
        "mtp_loss": record.mtp_loss,
    }
    for name in ("loss_scale", "aux_loss", "max_expert_load", "unused_experts"):
        if (value := getattr(record, name)) is not None:
            values[name] = value
    return values


def _to_json(value: Any) -> Any:
    """``value`` with numbers that JSON does not know as text, at any depth."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(inner) for key, inner in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl`` in file order, numbers as numbers ("nan" is NaN again).

    A line that is no such object, as a killed writer leaves at the end, is left out; so are validations and
    benchmarks.
    """
    return [values for values in _objects(path) if _is_step(values)]


def read_validations(path: Path) -> list[dict[str, Any]]:
    """The validations of a ``metrics.jsonl`` in file order, as `validation_metrics` makes them."""
    return [values for values in _objects(path) if _EVAL in values]


def cut_after(path: Path, step: int, *, evaluated_step: int | None = None) -> list[dict[str, Any]]:
    """Drop the steps after ``step``, which a resumed run does again, and return the steps that stay.

    Validations stay up to ``evaluated_step``, the last one of the run's state (by default ``step``). The old
    file is whole until the new one stands in its place.

    Raises:
        UserError: the new one cannot be written.
    """
    if not path.exists():
        return []
    last_validation = step if evaluated_step is None else evaluated_step
    kept = [
        (line, values)
        for line in _lines(path)
        if (values := _parse(line)) and values["step"] <= (last_validation if _EVAL in values else step)
    ]
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"training.output_dir: {path} cannot be written: {error.strerror}") from error
    return [values for _, values in kept if _is_step(values)]


class MetricsWriter:
    """Appends to ``metrics.jsonl``; each line is in the file when its method returns.

    A disk that takes no more stops no run: lines wait, and follow when there is room again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: StepRecord) -> None:
        self._append(metrics_of(record))

    def write_validation(self, step: int, result: EvalResult) -> None:
        self._append(validation_metrics(step, result))

    def write_benchmarks(self, step: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        self._append({"step": step, _BENCHMARKS: dict(scores)})

    def _append(self, values: dict[str, Any]) -> None:
        had_room = not self._waiting
        self._waiting += (json.dumps(_to_json(values), allow_nan=False) + "\n").encode()
        try:
            self._write_waiting()
        except OSError as error:
            if had_room:
                logger.error(
                    "%s cannot be written: %s. Its lines wait until there is room", self._path, error.strerror
                )

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            lines = self._waiting.count(b"\n")
            logger.error("%s lacks its last %d line(s): %s", self._path, lines, error.strerror)
        self._file.close()


def _is_step(values: dict[str, Any]) -> bool:
    return _EVAL not in values and _BENCHMARKS not in values


def _objects(path: Path) -> list[dict[str, Any]]:
    return [values for line in _lines(path) if (values := _parse(line)) is not None]


def _lines(path: Path) -> list[str]:
    # Not splitlines(): only "\n" ends a line of JSON Lines.
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        return None
    return _from_json(values)
