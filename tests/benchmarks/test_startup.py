"""benchmarks/startup.py: what it waits for is what a run prints, and a way that fails is told."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def startup() -> Any:
    return importlib.import_module("startup")


def test_the_phases_end_with_lines_that_a_run_logs_in_this_order(startup) -> None:
    source = (ROOT / "shardyard" / "train" / "run.py").read_text(encoding="utf-8")
    places = [source.index(f'logger.info("{line}")') for line in startup.PHASES]
    assert len(places) == 6 and places == sorted(places)


def test_the_line_of_the_first_step_is_the_monitor_s(startup) -> None:
    from shardyard.monitor import StepRecord, format_log_line

    fields: dict[str, Any] = dict.fromkeys(StepRecord.__dataclass_fields__, 1)
    assert startup.FIRST_STEP in format_log_line(StepRecord(**fields))


def test_a_way_costs_processor_time_and_the_least_of_its_rounds_counts(startup) -> None:
    cost = startup.cost_of(["-c", "print('before'); print('the line'); print('after')"], until="the line")
    assert cost.wall > 0 and cost.cpu > 0
    assert startup.Cost(3.0, 1.0).least(startup.Cost(2.0, 4.0)) == startup.Cost(2.0, 1.0)


@pytest.mark.parametrize("program", ["print('another line')", "print('the line'); raise SystemExit(3)"])
def test_a_run_without_the_line_or_with_a_fault_is_no_measurement(startup, program: str) -> None:
    with pytest.raises(RuntimeError, match=r"ended with [03]:\n.* line"):
        startup.cost_of(["-c", program], until="the line")


@pytest.mark.soak
def test_the_script_prints_both_tables(script) -> None:
    done = script("startup.py", "--rounds", "1", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "s above the bare import, 3 allowed" in done.stdout
    for row in ("bare import", "torchrun, 1 rank", "import torch", "data, from the cache", "first step"):
        assert f"| {row} " in done.stdout
