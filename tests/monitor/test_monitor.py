"""What the monitor prints and when, and what stands in metrics.jsonl, also after a resume."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest

from shardyard.monitor import METRICS_FILE, Monitor, StepRecord, read_metrics


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines():
    handler, logger = Lines(), logging.getLogger("shardyard.monitor")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.texts
    logger.removeHandler(handler)
    logger.setLevel(level)


def record(
    step: int, *, total: int = 10, loss: float = 1.0, ms: float = 100.0, lr: float = 1e-3
) -> StepRecord:
    return StepRecord(
        step=step, total_steps=total, consumed_samples=4 * step, consumed_tokens=50 * step, step_ms=ms, lr=lr,
        global_batch_size=4, loss=loss, grad_norm=float(step), tokens=50, memory_allocated_bytes=3,
        memory_reserved_bytes=5,
    )  # fmt: skip


def piece(line: str, name: str) -> str:
    found = re.search(rf"(?:^|\|) {re.escape(name)}:?\s+([^|]+?) \|", line)
    assert found is not None, (name, line)
    return found.group(1)


def test_a_line_stands_for_an_interval_and_the_last_step_gets_one(tmp_path: Path, lines: list[str]) -> None:
    monitor = Monitor(tmp_path, logging_steps=2)
    for step, loss, ms, lr in [(1, 4.0, 10.0, 0.1), (2, 2.0, 30.0, 0.2), (3, 1.5, 70.0, 0.3)]:
        monitor.record(record(step, total=3, loss=loss, ms=ms, lr=lr))
    monitor.close()
    assert [piece(line, "iteration") for line in lines] == ["2/       3", "3/       3"]
    assert [piece(line, "lm loss") for line in lines] == ["3.000000E+00", "1.500000E+00"]
    assert [piece(line, "elapsed time per iteration (ms)") for line in lines] == ["20.00", "70.00"]
    assert [piece(line, "learning rate") for line in lines] == ["2.000000E-01", "3.000000E-01"]
    assert [piece(line, "grad norm") for line in lines] == ["2.000", "3.000"]
    assert [piece(line, "consumed samples") for line in lines] == ["8", "12"]


def test_throughput_is_the_intervals_tokens_over_its_time(tmp_path: Path, lines: list[str]) -> None:
    monitor = Monitor(tmp_path, logging_steps=2, log_throughput=True)
    monitor.record(record(1, ms=100.0))
    monitor.record(record(2, ms=300.0))
    # 100 tokens in 0.4 s
    assert piece(lines[0], "tokens/s") == "250.00"


def test_cpu_memory_is_the_machines(tmp_path: Path, lines: list[str]) -> None:
    Monitor(tmp_path, logging_steps=1, log_cpu_memory=True).record(record(1))
    assert float(piece(lines[0], "cpu_available_memory(GB)")) > 0
    assert 0 < float(piece(lines[0], "cpu_memory_usage(%)")) <= 100


def test_a_nan_in_the_interval_is_not_averaged_away(tmp_path: Path, lines: list[str]) -> None:
    monitor = Monitor(tmp_path, logging_steps=2)
    monitor.record(record(1, loss=math.nan))
    monitor.record(record(2, loss=1.0))
    assert piece(lines[0], "lm loss") == "nan"


def test_other_ranks_print_and_write_nothing(tmp_path: Path, lines: list[str]) -> None:
    monitor = Monitor(tmp_path, logging_steps=1, is_main=False)
    monitor.record(record(1))
    monitor.close()
    assert lines == [] and list(tmp_path.iterdir()) == []


def test_every_step_is_one_line_of_valid_json_at_once(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, logging_steps=100)
    monitor.record(record(1, loss=1 / 3))
    monitor.record(record(2, loss=math.nan))
    texts = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").split("\n")  # before close: flushed
    assert texts[-1] == "" and len(texts) == 3

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    first, second = (json.loads(text, parse_constant=refuse) for text in texts[:2])
    assert first == {
        "step": 1, "total_steps": 10, "epoch": 0, "loss": 1 / 3, "lr": 1e-3, "grad_norm": 1.0, "tokens": 50,
        "samples": 4, "step_ms": 100.0, "memory": 3, "memory_reserved": 5, "consumed_samples": 4,
        "consumed_tokens": 50, "mtp_loss": 0.0,
    }  # fmt: skip
    assert second["loss"] == "nan"
    assert math.isnan(read_metrics(tmp_path / METRICS_FILE)[1]["loss"])


def test_a_resumed_run_leaves_each_step_once(tmp_path: Path) -> None:
    first = Monitor(tmp_path, logging_steps=1)
    for step in range(1, 8):
        first.record(record(step, loss=float(step)))
    first.close()
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "lo')  # killed while it wrote

    resumed = Monitor(tmp_path, logging_steps=1, resume_step=5)
    for step in range(6, 11):
        resumed.record(record(step, loss=step + 0.5))
    resumed.close()
    values = read_metrics(tmp_path / METRICS_FILE)
    assert [v["step"] for v in values] == list(range(1, 11))
    assert [v["loss"] for v in values] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.5, 8.5, 9.5, 10.5]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    old = Monitor(tmp_path, logging_steps=1)
    old.record(record(1))
    old.close()
    Monitor(tmp_path, logging_steps=1, resume_step=0).close()
    assert (tmp_path / METRICS_FILE).read_text(encoding="utf-8") == ""


def test_an_interval_cut_by_a_resume_prints_the_unbroken_runs_loss(tmp_path: Path, lines: list[str]) -> None:
    losses = [0.1, 0.2, 0.7, 1 / 3]
    unbroken = Monitor(tmp_path / ".", logging_steps=4)
    for step, loss in enumerate(losses, 1):
        unbroken.record(record(step, loss=loss))
    unbroken.close()
    resumed = Monitor(tmp_path, logging_steps=4, resume_step=2)
    for step, loss in list(enumerate(losses, 1))[2:]:
        resumed.record(record(step, loss=loss))
    assert len(lines) == 2
    assert piece(lines[0], "lm loss") == piece(lines[1], "lm loss")
