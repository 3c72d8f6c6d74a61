"""Two runs in one folder: the second is refused while the first goes on, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardyard.checkpoint.in_use import LOCKED, held, refuse_if_in_use
from shardyard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HOLDS = """
import os, sys, time
from pathlib import Path
from shardyard.checkpoint.in_use import held
folder = Path(sys.argv[1])
with held(folder):
    worker = os.fork()  # as a loader's worker
    if not worker:
        time.sleep(60)
    print(worker, flush=True)
    sys.stdin.read()
"""


@contextmanager
def run_in(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the folder, and a worker that it has forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        yield process, worker
    finally:
        process.kill()
        process.wait()
        os.kill(worker, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / LOCKED).write_text("training: {}\n")
    return tmp_path


def test_a_second_run_is_refused_by_the_process_of_the_first(folder: Path) -> None:
    with run_in(folder) as (process, _):
        with pytest.raises(UserError) as caught:
            refuse_if_in_use(folder, wait_s=0)
        assert f"{folder} belongs to a run that is going on (process {process.pid})" in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == [LOCKED]


def test_a_killed_run_holds_nothing_though_its_workers_live(folder: Path) -> None:
    with run_in(folder) as (process, worker):
        process.kill()
        process.wait()
        os.kill(worker, 0)  # still there
        refuse_if_in_use(folder, wait_s=0)


def test_a_run_that_is_just_ending_is_waited_for(folder: Path) -> None:
    with run_in(folder) as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        refuse_if_in_use(folder, wait_s=20)


def test_a_new_folder_and_this_process_itself_are_no_obstacle(folder: Path, tmp_path: Path) -> None:
    refuse_if_in_use(tmp_path / "new", wait_s=0)
    with held(folder), held(tmp_path / "gone"), held(folder, holds=False):
        refuse_if_in_use(folder, wait_s=0)
