"""metrics.jsonl on a disk that is full for a while: no run ends for it, and no line is torn or lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import UserError
from shardyard.monitor import StepRecord
from shardyard.monitor.metrics import MetricsWriter, cut_after


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, total_steps=9, consumed_samples=step, consumed_tokens=step, step_ms=1.0, lr=1e-3,
        global_batch_size=1, loss=float(step), grad_norm=1.0, tokens=1, memory_allocated_bytes=0,
        memory_reserved_bytes=0,
    )  # fmt: skip


class _Disk:
    """An unbuffered file on a disk with ``room`` bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 10**9

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_wait_for_room_and_follow_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    disk: Any = _Disk(writer._file)
    writer._file = disk
    writer.write(record(1))
    disk.room = 30  # the next line is torn, for now
    for step in (2, 3):
        writer.write(record(step))
    assert [found.levelname for found in caplog.records] == ["ERROR"], "said once"
    assert "No space left on device" in caplog.text
    disk.room = 10**9
    writer.write(record(4))
    writer.close()
    assert steps_in(path) == [1, 2, 3, 4]


def test_what_never_finds_room_is_said_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    disk: Any = _Disk(writer._file)
    writer._file = disk
    disk.room = 0
    writer.write(record(1))
    writer.write(record(2))
    writer.close()
    assert "lacks its last 2 line(s)" in caplog.text


def test_a_resume_that_cannot_rewrite_it_says_so_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2, 3):
        writer.write(record(step))
    writer.close()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        cut_after(path, 2)
    assert str(caught.value) == f"training.output_dir: {path} cannot be written: No space left on device"
    assert steps_in(path) == [1, 2, 3] and [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]
