"""The log line: golden text written out by hand, and the two patterns that existing tools parse it with."""

from __future__ import annotations

import re
from dataclasses import replace

from shardyard.monitor import CpuMemory, StepRecord, format_log_line

GIB = 1024**3
NUMBER = r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
TIME_LOSS_NORM = re.compile(
    rf"elapsed time per iteration \(ms\):\s+{NUMBER}\s*\|.*?lm loss:\s+{NUMBER}\s*\|.*?grad norm:\s+{NUMBER}"
)
STEP_MEMORY = re.compile(rf"iteration\s+(\d+)/\s*\d+\s*\|.*?max_memory_allocated\(GB\):\s+{NUMBER}")

RECORD = StepRecord(
    step=1,
    total_steps=2000,
    consumed_samples=8,
    consumed_tokens=564,
    step_ms=7827.39,
    lr=1 / 6_000_000,
    global_batch_size=8,
    loss=3.316887,
    grad_norm=70.959,
    tokens=564,
    memory_allocated_bytes=19 * GIB + GIB // 4,
    memory_reserved_bytes=21 * GIB - GIB // 2,
)

GOLDEN = (
    " iteration        1/    2000 | consumed samples:          8 | consumed tokens:        564 |"
    " elapsed time per iteration (ms): 7827.39 | learning rate: 1.666667E-07 | global batch size:     8 |"
    " lm loss: 3.316887E+00 | mtp loss: 0.000000E+00 | grad norm: 70.959 |"
    " max_memory_allocated(GB): 19.25 | max_memory_reserved(GB): 20.50 |"
)


def test_the_line_is_the_references_character_by_character() -> None:
    assert format_log_line(RECORD) == GOLDEN


def test_existing_patterns_find_time_loss_norm_step_and_memory() -> None:
    line = format_log_line(RECORD, tokens_per_second=1.0, cpu_memory=CpuMemory(GIB, GIB, 50.0))
    found = TIME_LOSS_NORM.search(line)
    assert found is not None and found.groups() == ("7827.39", "3.316887E+00", "70.959")
    found = STEP_MEMORY.search(line)
    assert found is not None and found.groups() == ("1", "19.25")


def test_optional_pieces_stand_in_their_places() -> None:
    line = format_log_line(
        replace(RECORD, aux_loss=0.5, mtp_loss=0.25),
        tokens_per_second=1234.5,
        cpu_memory=CpuMemory(used_bytes=3 * GIB, available_bytes=5 * GIB, percent=37.5),
    )
    assert (
        "(ms): 7827.39 | tokens/s: 1234.50 | learning rate: 1.666667E-07 |" in line
        and "| mtp loss: 2.500000E-01 | aux loss: 5.000000E-01 | grad norm: 70.959 |" in line
        and line.endswith(
            "| max_memory_reserved(GB): 20.50 | cpu_used_memory(GB): 3.00 |"
            " cpu_available_memory(GB): 5.00 | cpu_memory_usage(%): 37.5 |"
        )
    )
    assert "mfu" not in line


def test_nan_and_infinity_are_shown_as_what_they_are() -> None:
    line = format_log_line(replace(RECORD, loss=float("nan"), mtp_loss=float("-inf"), grad_norm=float("inf")))
    assert "lm loss: nan |" in line and "mtp loss: -inf |" in line and "grad norm: inf |" in line
