"""Ranks killed at random moments, in saves too: the run goes on from the newest checkpoint as if unbroken."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from support.ranks import RankFailure, RankPool
from support.whole_runs import (
    MARGIN,
    TIMEOUT_S,
    latest_checkpoint,
    metrics,
    numbers_of,
    rank_of_run,
    steps_begun,
    train,
    write_numbered,
    write_workspace,
)

ROWS, STEPS, WORLD = 16, 12, 2  # 3 epochs of 16 rows in batches of 4
WORDS = [
    "--training.per_device_train_batch_size", "2", "--training.save_steps", "1",
    "--training.save_total_limit", "2",
]  # fmt: skip
LATEST = ["--training.resume_from_checkpoint", "latest"]
KILLS, QUICK = 60, (0, 2)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("kills"))
    write_numbered(folder / "rows.jsonl", range(ROWS))
    train(ranks, folder, "unbroken", *WORDS, world=WORLD)
    return folder


def kill_at_random(ranks: RankPool, folder: Path, out: str, words: list[str], seed: int) -> None:
    """Start a run and kill one of its ranks or all when ``seed`` says; one time in three in a save."""
    draw = random.Random(seed)
    after, wait_s = draw.randint(1, STEPS - 3), draw.uniform(0.0, 0.15)
    victims = range(WORLD) if draw.random() < 0.5 else [draw.randrange(WORLD)]

    def work() -> None:
        with pytest.raises(RankFailure):
            ranks.run(
                WORLD, rank_of_run, folder, out, "killed", words, after + MARGIN, init_process_group=False,
                timeout_s=TIMEOUT_S,
            )  # fmt: skip

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while thread.is_alive() and steps_begun(folder, out, "killed", WORLD) < after:
        assert time.monotonic() < deadline, f"{after} steps never came"
        time.sleep(0.002)
    if seed % 3 == 2:
        saving = folder / out / "checkpoints"
        while thread.is_alive() and not any(saving.glob(".tmp-global_step_*")):
            assert time.monotonic() < deadline, "no save ever came"
            time.sleep(0.0005)
        wait_s *= 0.3
    time.sleep(wait_s)
    for rank in victims:
        pid = int((folder / f"{out}.killed.{rank}.pid").read_text())
        os.kill(pid, signal.SIGKILL)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def told(folder: Path, out: str) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens")
    return [tuple(row[key] for key in keys) for row in metrics(folder, out)]


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.soak) for n in range(KILLS)]
)
def test_a_killed_run_goes_on_bit_for_bit(workspace: Path, ranks: RankPool, seed: int) -> None:
    out = f"run{seed}"
    words = [*WORDS, "--training.save_async", "true" if seed % 2 else "false"]
    kill_at_random(ranks, workspace, out, words, seed)
    newest = latest_checkpoint(workspace, out)
    rest = train(ranks, workspace, out, *words, *LATEST, world=WORLD, leg="rest")
    assert rest.first_step == newest + 1, "the newest complete checkpoint is the one that loads"
    assert told(workspace, out) == told(workspace, "unbroken")
    assert not list((workspace / out).rglob(".tmp*"))
    whole = train(ranks, workspace, "again", *WORDS, world=WORLD, leg=f"again{seed}") if seed == 0 else None
    if whole is not None:  # what each step was given, rank by rank
        assert {step: whole.steps[step] for step in rest.steps} == rest.steps
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
        seen = [n for step in whole.steps for n in numbers_of(tokenizer, whole.steps[step])]
        assert sorted(seen) == sorted([*range(ROWS)] * 3)
