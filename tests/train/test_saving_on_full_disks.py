"""A disk with room for one and a half checkpoints: the run ends or goes on; the first one stays whole."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import RankFailure, RankPool
from support.whole_runs import metrics, train, write_numbered, write_workspace

from shardyard.checkpoint import fault_of
from shardyard.errors import UserError

WORDS = [
    "--training.per_device_train_batch_size", "2", "--training.num_train_epochs", "2",
    "--training.save_steps", "2", "--training.save_total_limit", "1",
]  # fmt: skip
STEPS = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("full"))
    write_numbered(folder / "rows.jsonl", range(8))
    return folder


@pytest.fixture(scope="module")
def checkpoint_bytes(workspace: Path, ranks: RankPool) -> int:
    train(ranks, workspace, "roomy", *WORDS, world=2)
    files = (workspace / "roomy" / "checkpoints" / "global_step_4").rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


@pytest.fixture
def small_disk(workspace: Path, checkpoint_bytes: int) -> Iterator[Path]:
    """A file system of its own on ``output_dir``."""
    out = workspace / "small"
    out.mkdir(exist_ok=True)
    size = int(checkpoint_bytes * 1.5) // 4096 * 4096
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)], capture_output=True, text=True
    )
    assert mounted.returncode == 0, f"this test mounts a tmpfs, as root: {mounted.stderr}"
    yield out
    subprocess.run(["umount", str(out)], check=True)


@pytest.mark.soak
@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("then", ["stop", "continue"])
def test_the_first_checkpoint_is_whole_and_the_run_does_as_it_was_told(
    workspace: Path, ranks: RankPool, small_disk: Path, then: str, save_async: bool
) -> None:
    words = [*WORDS, "--training.on_save_error", then, "--training.save_async", str(save_async).lower()]
    leg = f"{then}{save_async}"
    if then == "stop":
        with pytest.raises(RankFailure) as caught:
            train(ranks, workspace, "small", *words, world=2, leg=leg)
        causes = list(caught.value.causes.values())
        assert len(causes) == 2 and all(isinstance(cause, UserError) for cause in causes), caught.value
        assert "no space is left" in str(causes[0]) and str(causes[0]) == str(causes[1])
    else:
        run = train(ranks, workspace, "small", *words, world=2, leg=leg)
        assert re.search(r"no space is left.*on_save_error: continue", run.log), run.log
        losses = [[row["loss"] for row in metrics(workspace, out)] for out in ("small", "roomy")]
        assert len(losses[0]) == STEPS and losses[0] == losses[1]
    folder = small_disk / "checkpoints"
    assert fault_of(folder / "global_step_2") is None
    assert (folder / "latest").read_text().strip() == "global_step_2"
    assert not list(folder.glob(".tmp*")) and not (folder / "global_step_4").exists()
