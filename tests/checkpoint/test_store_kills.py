"""``kill -9`` at any place of a save, of one rank or all: something complete is left."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import die_at_file_operation, local_values, overwrite, small_model
from support.ranks import RankFailure

from shardyard.checkpoint import CheckpointStore, fault_of
from shardyard.checkpoint.folder import clean, leftovers


def make_store(out: Path, limit: int | None) -> Any:
    from shardyard.checkpoint.store import background_group

    return CheckpointStore(out, save_total_limit=limit, background=background_group)


def die_at_place(out: Path, place: int, second: int, wait: bool) -> bool:
    """Save step 1, then ``second``, killed at its ``place``-th file operation; True when it has fewer."""
    model, optimizer = small_model(4)
    store = make_store(out, limit=1)
    overwrite(model, optimizer, 1.0)
    store.save(1, model=model, optimizer=optimizer, run_state={"save": 1})
    overwrite(model, optimizer, 2.0)
    die_at_file_operation(place)
    store.save(second, model=model, optimizer=optimizer, run_state={"save": 2}, wait=wait)
    store.wait()
    return True


def load(out: Path) -> tuple[str, int, set[float]]:
    model, optimizer = small_model(4)
    found = CheckpointStore(out, save_total_limit=None).load_latest(model=model, optimizer=optimizer)
    assert found is not None
    values = local_values(model, optimizer).values()
    return found.path.name, found.run_state["save"], {float(value.flat[0]) for value in values}


@pytest.mark.parametrize(
    ("second", "wait", "stride"),
    [
        (2, True, 13),
        (1, False, 13),
        *(pytest.param(*case, 1, marks=pytest.mark.soak) for case in ((2, True), (2, False), (1, True))),
    ],
)
def test_wherever_a_save_dies_one_checkpoint_is_whole(ranks, tmp_path, second, wait, stride):
    """The old one until the new one is complete; also when the new one takes the old one's place."""
    saves, survived = [], False
    for place in range(0, 500, stride):
        out = tmp_path / str(place)
        try:
            survived = ranks.run(1, die_at_place, out, place, second, wait, init_process_group=False)[0]
        except RankFailure as failure:
            assert f"exit code {-signal.SIGKILL}" in str(failure)
        latest = CheckpointStore(out, save_total_limit=None).latest()
        assert latest is not None and fault_of(latest) is None
        clean(out / "checkpoints")
        assert leftovers(out / "checkpoints") == []
        name, save, values = ranks.run(1, load, out, init_process_group=False)[0]
        assert values == {float(save)} and name == f"global_step_{1 if save == 1 else second}"
        saves.append(save)
        shutil.rmtree(out)
        if survived:
            break
    assert survived and saves[0] == 1 and saves[-1] == 2 and saves == sorted(saves)
    assert stride > 1 or len(saves) > 20


def save_until_killed(out: Path, delay_s: float, victims: list[int], beside: bool) -> None:
    """Save on and on; ``victims`` kill themselves ``delay_s`` after the first save is complete."""
    import torch.distributed as dist

    model, optimizer = small_model(256)
    store = make_store(out, limit=2)
    done = out / f"done-{dist.get_rank()}"
    for step in range(1, 10_000):
        overwrite(model, optimizer, float(step))
        before = store.wait()
        if before is not None:
            done.write_text(before.name)
        store.save(step, model=model, optimizer=optimizer, run_state={"save": step}, wait=not beside)
        if not beside:
            done.write_text(f"global_step_{step}")
        if step == 1:
            store.wait()
            if dist.get_rank() in victims:
                threading.Thread(target=kill_soon, args=(delay_s,), daemon=True).start()


def kill_soon(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def load_large(out: Path) -> tuple[int, set[float]]:
    model, optimizer = small_model(256)
    found = CheckpointStore(out, save_total_limit=None).load_latest(model=model, optimizer=optimizer)
    assert found is not None
    values = local_values(model, optimizer).values()
    return found.run_state["save"], {float(element) for value in values for element in np.unique(value)}


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("victims", [[0, 1], [1]])
def test_kill_minus_nine_at_a_random_moment_leaves_the_newest_complete_one(
    ranks, tmp_path, victims, beside, kills
):
    rng = np.random.default_rng(len(victims) + 2 * beside)
    for number in range(kills):
        out = tmp_path / str(number)
        with pytest.raises(RankFailure):
            ranks.run(2, save_until_killed, out, float(rng.uniform(0.0, 0.5)), victims, beside)
        clean(out / "checkpoints")
        seen = [int(path.read_text().rpartition("_")[2]) for path in out.glob("done-*") if path.read_text()]
        for save, values in ranks.run(1, load_large, out):
            assert values == {float(save)} and save >= max(seen, default=1)
        assert leftovers(out / "checkpoints") == []
        shutil.rmtree(out)
