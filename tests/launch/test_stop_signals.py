"""Launchers that are asked to stop: the ranks save within the grace, and the exit code says so."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.launched import Training, assert_all_gone, make_assets

from shardyard.checkpoint import fault_of

GRACE_S = 30.0
"""What torchrun's agent gives its ranks by default, and ours."""
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets") / "assets")


@pytest.mark.parametrize(
    ("launcher", "number", "whom"),
    [
        ("shardyard", signal.SIGTERM, "launcher"),
        pytest.param("shardyard", signal.SIGUSR1, "launcher", marks=SOAK),
        pytest.param("shardyard", signal.SIGUSR1, "rank 1", marks=SOAK),
        pytest.param("torchrun", signal.SIGTERM, "launcher", marks=SOAK),
        pytest.param("torchrun", signal.SIGUSR1, "rank 1", marks=SOAK),
    ],
)
def test_the_ranks_save_before_the_launcher_kills_them(
    tmp_path: Path, assets: Path, launcher: str, number: signal.Signals, whom: str
) -> None:
    training = Training(tmp_path, assets, launcher, ranks=2)
    training.wait_for_step(2)
    pids = training.pids()
    os.kill(training.process.pid if whom == "launcher" else pids[1], number)
    code = training.process.wait(timeout=GRACE_S + 30)
    log = training.text()
    assert_all_gone(pids)
    folder = training.output / "checkpoints"
    newest = (folder / "latest").read_text().strip()
    step = int(newest.removeprefix("global_step_"))
    assert step >= 2 and fault_of(folder / newest) is None and not list(folder.glob(".tmp*"))
    assert f"after step {step} of 100000, which is saved" in log
    # The rank that got a signal knows which; the others are told that one came.
    assert "Traceback" not in log or launcher == "torchrun"
    if launcher == "shardyard":
        assert code == 75, log
        name = number.name if whom == "launcher" else "a signal"
        assert log.strip().splitlines()[-1].startswith(f"stopped by {name}; the run has saved step {step}")
    elif whom == "launcher":
        assert code != 0, log  # torchrun has its own way to say that it was stopped
    else:
        assert code == 1 and re.search(r"exitcode\s*: 75", log), log
