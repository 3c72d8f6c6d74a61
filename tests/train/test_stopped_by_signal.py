"""A run that is asked to stop saves its step, on all ranks, and goes on from there as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from support.ranks import RankPool
from support.whole_runs import TIMEOUT_S, metrics, rank_of_run, train, write_numbered, write_workspace

STEPS = 9  # 3 epochs of 12 rows in batches of 4


def signalled_rank(folder: Path, words: list[str], step: int, victim: int, number: int) -> int:
    """One rank of a run, of which ``victim`` gets the signal ``number`` as it begins ``step``."""
    from shardyard.train.step import TrainStep

    make_step = TrainStep.__call__

    def signal_and_step(self, micro_batches, **arguments):
        if arguments["step"] == step and os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), number)
        return make_step(self, micro_batches, **arguments)

    TrainStep.__call__ = signal_and_step
    return rank_of_run(folder, "signalled", "first", words, None)


def interrupted_rank(folder: Path, words: list[str], step: int) -> tuple[bool, str]:
    """Whether Ctrl-C in ``step`` came through, and what the log says last."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        signalled_rank(folder, words, step, 0, signal.SIGINT)
    except KeyboardInterrupt:
        return True, (folder / "signalled.first.0.log").read_text()
    return False, ""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("signals"))
    write_numbered(folder / "rows.jsonl", range(12))
    return folder


@pytest.mark.parametrize(("step", "says"), [(2, "no step is saved"), (7, "step 5 is saved; go on with")])
def test_ctrl_c_says_what_is_saved(workspace, ranks, step, says):
    shutil.rmtree(workspace / "signalled", ignore_errors=True)
    words = ["--training.per_device_train_batch_size", "4", "--training.save_steps", "5"]
    arguments = (workspace, words, step)
    (found,) = ranks.run(1, interrupted_rank, *arguments, init_process_group=False, timeout_s=TIMEOUT_S)
    came_through, log = found
    assert came_through and f"interrupted after step {step - 1}; {says}" in log


WORDS = ["--training.per_device_train_batch_size", "2", "--training.save_steps", "5"]
LATEST = ["--training.resume_from_checkpoint", "latest"]


@pytest.mark.parametrize(
    ("number", "step", "more"),
    [
        (signal.SIGTERM, 3, []),
        pytest.param(signal.SIGUSR1, 4, ["--training.save_async", "true"], id="beside an async save"),
        pytest.param(
            signal.SIGTERM,
            4,
            ["--training.save_only_model"],
            id="of a run that saves weights alone",
            marks=pytest.mark.soak,
        ),
        pytest.param(signal.SIGUSR1, STEPS, [], id="in the last step", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, 5, [], id="in a step that is saved anyway", marks=pytest.mark.soak),
    ],
)
def test_one_rank_is_told_and_all_save_the_same_step(workspace, ranks, number, step, more):
    for name in ("signalled", "unbroken"):
        shutil.rmtree(workspace / name, ignore_errors=True)
    words = [*WORDS, *more]
    codes = ranks.run(
        2, signalled_rank, workspace, words, step, 1, number, init_process_group=False, timeout_s=TIMEOUT_S
    )
    assert codes == [75, 75]
    checkpoints = workspace / "signalled" / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == f"global_step_{step}"
    assert not list(checkpoints.glob(".tmp*"))
    log = (workspace / "signalled.first.0.log").read_text()
    assert f"after step {step} of {STEPS}, which is saved" in log

    train(ranks, workspace, "unbroken", *words, world=2)
    rest = train(
        ranks,
        workspace,
        "signalled",
        *words,
        "--training.resume_from_checkpoint",
        "latest",
        world=2,
        leg="rest",
    )
    assert "differs from the one that wrote" not in rest.log
    told = [
        [{key: row[key] for key in ("step", "loss", "grad_norm", "lr", "consumed_samples")} for row in rows]
        for rows in (metrics(workspace, "signalled"), metrics(workspace, "unbroken"))
    ]
    assert [row["step"] for row in told[0]] == list(range(1, STEPS + 1))
    assert json.dumps(told[0]) == json.dumps(told[1])


def test_with_save_on_signal_false_the_signal_ends_the_rank(workspace, ranks):
    from support.ranks import RankFailure

    words = [*WORDS, "--training.save_on_signal", "false", "--training.overwrite_output_dir", "true"]
    with pytest.raises(RankFailure):
        ranks.run(
            1, signalled_rank, workspace, words, 2, 0, signal.SIGTERM, init_process_group=False, timeout_s=60
        )
    assert not list((workspace / "signalled" / "checkpoints").glob("global_step_2"))
