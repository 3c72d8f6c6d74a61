"""Real runs of the quick start's model under a launcher, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITH_ENTRY = """
import sys
from shardyard.cli.train import Launch, start_ranks
sys.exit(start_ranks([sys.executable, "-u", *sys.argv[1:]], {ranks}, Launch()))
"""


def make_assets(folder: Path) -> Path:
    """The quick start's model and data."""
    script = ROOT / "examples" / "quickstart" / "make_assets.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True, timeout=120)
    return folder


class Training:
    """A run on ``ranks`` ranks that would go on for long; its log goes to a file so that no pipe can fill up.

    ``entry`` is a script to run instead of train_fsdp2.py.
    """

    def __init__(
        self,
        folder: Path,
        assets: Path,
        launcher: str,
        entry: Path | None = None,
        more: tuple[str, ...] = (),
        ranks: int = 4,
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
            command = [*torchrun, f"--nproc_per_node={ranks}", script, *config]
        elif entry is not None:
            command = [sys.executable, "-c", WITH_ENTRY.format(ranks=ranks), script, *config]
        else:
            command = [sys.executable, "-m", "shardyard", "train", *config, f"--nproc-per-node={ranks}"]
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
