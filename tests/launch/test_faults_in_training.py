"""In step 3 of a real run of 4 ranks, one is killed or raises: all end soon, the log says which and why."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.launched import Training, assert_all_gone, make_assets

RANKS, VICTIM = 4, 2
BOUND_S = 60.0
# What the raising rank runs instead of train_fsdp2.py: the same, with a step that fails once.
RAISING_ENTRY = f"""
import os, sys
from shardyard.cli.rank import guard, run_rank

def work():
    from shardyard.train.step import TrainStep
    run_step = TrainStep.__call__

    def fail_in_step_3(self, micro_batches, *, step, lr):
        if step == 3 and self.group.rank == {VICTIM}:
            raise ValueError("the injected fault")
        return run_step(self, micro_batches, step=step, lr=lr)

    TrainStep.__call__ = fail_in_step_3
    return run_rank(sys.argv[1:])

if __name__ == "__main__":
    sys.exit(guard(work))
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets") / "assets")


SOAK = pytest.mark.soak  # each case starts four ranks


@pytest.mark.parametrize("launcher", ["shardyard", pytest.param("torchrun", marks=SOAK)])
def test_a_killed_rank_ends_all_ranks_and_is_named(tmp_path: Path, assets: Path, launcher: str) -> None:
    training = Training(tmp_path, assets, launcher)
    training.wait_for_step(2)
    pids = training.pids()
    assert sorted(pids) == list(range(RANKS))
    os.kill(pids[VICTIM], signal.SIGKILL)
    code = training.process.wait(timeout=BOUND_S)
    assert code == 1, training.text()
    assert_all_gone(pids)
    log = training.text()
    if launcher == "shardyard":
        last = log.strip().splitlines()[-1]
        assert last.startswith(
            f"training stopped: rank {VICTIM} (pid {pids[VICTIM]}) was killed by signal 9, SIGKILL"
        )
    else:
        assert re.search(rf"rank\s*: {VICTIM} .*\n.*exitcode\s*: -9 \(pid: {pids[VICTIM]}\)", log), log


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("shardyard", marks=SOAK)])
def test_a_raising_rank_ends_all_ranks_and_says_why(tmp_path: Path, assets: Path, launcher: str) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(RAISING_ENTRY, encoding="utf-8")
    training = Training(tmp_path, assets, launcher, entry)
    training.wait_for_step(1)
    pids = training.pids()
    training.wait_for_step(2)
    code = training.process.wait(timeout=BOUND_S)
    assert code == 1, training.text()
    assert_all_gone(pids)
    log = training.text()
    heads = re.findall(r"^rank (\d+) \(.*\) failed in step 3.*: ValueError: the injected fault$", log, re.M)
    assert heads == [str(VICTIM)], log
    if launcher == "shardyard":
        assert log.strip().splitlines()[-1].startswith(f"training stopped: rank {VICTIM} (pid ")


def test_a_nan_that_all_ranks_see_is_told_once_and_no_step_is_recorded_after_it(
    tmp_path: Path, assets: Path
) -> None:
    # After one update with this learning rate every weight is far beyond what a forward can take.
    wild = ("training.lr=1e30", "training.lr_scheduler_type=constant", "training.warmup_ratio=0")
    training = Training(tmp_path, assets, "shardyard", more=wild)
    assert training.process.wait(timeout=240) == 1, training.text()
    log = training.text()
    heads = re.findall(r"^rank \d+ \(.*\): step 2: .*NaN or Inf", log, re.M)
    assert len(heads) == 1 and "Traceback" not in log, log
    assert (training.output / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1
