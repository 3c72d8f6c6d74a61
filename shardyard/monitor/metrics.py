"""``metrics.jsonl``: one JSON object a step, each step once, also after a resume."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any, TextIO

from shardyard.monitor.record import StepRecord

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger("shardyard.monitor")


def metrics_of(record: StepRecord) -> dict[str, Any]:
    """The object written for ``record``: counts, losses per token, milliseconds, bytes.

    JSON knows no NaN and no infinity: such a number is written as the string "nan", "inf" or "-inf".
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
    if record.aux_loss is not None:
        values["aux_loss"] = record.aux_loss
    return {key: _json_number(value) for key, value in values.items()}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a ``metrics.jsonl`` in file order, numbers as numbers ("nan" is NaN again).

    A line that is no such object, as a killed writer leaves at the end, is left out.
    """
    return [values for line in _lines(path) if (values := _parse(line)) is not None]


def cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the steps after ``step``, which a resumed run does again, and return what stays.

    The old file is whole until the new one stands in its place.
    """
    if not path.exists():
        return []
    kept = [(line, values) for line in _lines(path) if (values := _parse(line)) and values["step"] <= step]
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return [values for _, values in kept]


class MetricsWriter:
    """Appends steps to ``metrics.jsonl``; each line is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", newline="\n")

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(metrics_of(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in values.items()}
