"""In step 3 of a real run of 4 ranks, one is killed or raises: all end soon, the log says which and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
SHARDYARD_WITH_ENTRY = f"""
import sys
from shardyard.cli.train import Launch, start_ranks
sys.exit(start_ranks([sys.executable, "-u", *sys.argv[1:]], {RANKS}, Launch()))
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets") / "assets"
    script = ROOT / "examples" / "quickstart" / "make_assets.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True, timeout=120)
    return folder


class Training:
    """A run on four ranks that would go on for long; its log goes to a file so that no pipe can fill up."""

    def __init__(
        self, folder: Path, assets: Path, launcher: str, entry: Path | None = None, more: tuple[str, ...] = ()
    ) -> None:
        self.output, self.log_path = folder / "out", folder / "log.txt"
        config = [
            str(ROOT / "examples" / "quickstart" / "tune_tiny_qwen3.yaml"),
            f"model.model_name_or_path={assets}/model",
            f"model.cache_dir={folder}/cache",
            f"data.dataset={assets}/alpaca.parquet",
            f"training.output_dir={self.output}",
            "training.max_steps=100000",
            "training.per_device_train_batch_size=1",
            "training.logging_steps=1",
            *more,
        ]
        script = str(entry or ROOT / "train_fsdp2.py")
        if launcher == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc_per_node={RANKS}", script, *config]
        elif entry is not None:
            command = [sys.executable, "-c", SHARDYARD_WITH_ENTRY, script, *config]
        else:
            command = [sys.executable, "-m", "shardyard", "train", *config, f"--nproc-per-node={RANKS}"]
        self.log = self.log_path.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self.log, stderr=self.log,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def text(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def wait_for_step(self, step: int) -> None:
        metrics, deadline = self.output / "metrics.jsonl", time.monotonic() + 240
        while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < step:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def pids(self) -> dict[int, int]:
        """Rank -> pid of the launcher's children."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                environ = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or not ours
                continue
            rank = [word.partition(b"=")[2] for word in environ if word.startswith(b"RANK=")]
            if parent == self.process.pid and rank:
                found[int(rank[0])] = int(folder.name)
        return found


def assert_all_gone(pids: dict[int, int]) -> None:
    for rank, pid in pids.items():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z", (
            f"rank {rank} is left"
        )


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
