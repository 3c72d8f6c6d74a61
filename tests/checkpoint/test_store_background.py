"""Saves that do not wait: values of the call, one verdict, nothing published before it is complete."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import files_of, local_values, overwrite, small_model

from shardyard.checkpoint import CheckpointStore, fault_of
from shardyard.errors import UserError


def make_store(out: Path, limit: int | None = None) -> Any:
    from shardyard.checkpoint.store import background_group

    return CheckpointStore(out, save_total_limit=limit, background=background_group)


class Gate:
    """Holds every write of tensors back until it is opened."""

    def __init__(self) -> None:
        from shardyard.checkpoint import store

        self.open = threading.Event()
        real = store.write_tensors

        def write(*args: Any) -> Any:
            assert self.open.wait(60)
            return real(*args)

        store.write_tensors = write  # pyright: ignore[reportAttributeAccessIssue]


def save_and_go_on(out: Path) -> dict[str, Any]:
    """Save, change everything at once and use the main group while the save is under way."""
    import torch
    import torch.distributed as dist

    model, optimizer = small_model(64)
    store, gate = make_store(out), Gate()
    states = [store.poll()]
    wanted = local_values(model, optimizer)
    path = store.save(1, model=model, optimizer=optimizer, run_state={"step": 1}, wait=False, best=True)
    overwrite(model, optimizer, 7.0)
    states.append(store.poll())
    sums = [torch.ones(3) for _ in range(20)]
    for one in sums:
        dist.all_reduce(one)
    before = path.exists() or (path.parent / "latest").exists() or (path.parent / "best").exists()
    gate.open.set()
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
    made = store.wait()
    states.append(store.poll())
    # The second waits for the first, whose values it must not take.
    store.save(2, model=model, optimizer=optimizer, run_state={"step": 2}, wait=False)
    overwrite(model, optimizer, 8.0)
    store.save(3, model=model, optimizer=optimizer, run_state={"step": 3}, wait=False)
    overwrite(model, optimizer, 9.0)
    complete_at_third = fault_of(out / "checkpoints" / "global_step_2")
    while store.poll() == "running":
        time.sleep(0.01)
    states.append(store.poll())
    store.close()
    found = []
    for step in (1, 2, 3):
        store.load(out / "checkpoints" / f"global_step_{step}", model=model, optimizer=optimizer)
        found.append(local_values(model, optimizer))
    return {
        "states": states, "sums": {one[0].item() for one in sums}, "before": before, "made": made == path,
        "wanted": wanted, "found": found, "at third": complete_at_third,
    }  # fmt: skip


def test_a_save_beside_the_training_holds_the_values_of_its_call(ranks, tmp_path):
    for seen in ranks.run(2, save_and_go_on, tmp_path):
        assert seen["states"] == ["idle", "running", "idle", "finished"]
        assert seen["sums"] == {2.0} and seen["made"] and not seen["before"] and seen["at third"] is None
        first, second, third = seen["found"]
        assert first.keys() == seen["wanted"].keys() and len(first) == 3 + 2 * 3
        for name, value in seen["wanted"].items():
            assert np.array_equal(first[name], value), name
            assert np.all(second[name] == 7) and np.all(third[name] == 8), name
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step_3\n"
    assert (tmp_path / "checkpoints" / "best").read_text() == "global_step_1\n"


def save_in_both_ways(out: Path) -> list[str]:
    model, optimizer = small_model(16)
    for name, wait in (("with", True), ("beside", False)):
        store = make_store(out / name)
        store.save(5, model=model, optimizer=optimizer, run_state={"step": 5}, wait=wait)
        store.close()
    return files_of(out / "beside" / "checkpoints" / "global_step_5")


def test_both_ways_write_the_same_files(ranks, tmp_path):
    names = ranks.run(2, save_in_both_ways, tmp_path)[0]
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "run_state.json"]
    one, other = (tmp_path / way / "checkpoints" / "global_step_5" for way in ("with", "beside"))
    for name in ("__0_0.distcp", "__1_0.distcp", "run_state.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def fail_once(out: Path) -> dict[str, Any]:
    """Rank 1's disk is full during the second of three saves."""
    import torch.distributed as dist

    from shardyard.checkpoint import writing

    model, optimizer = small_model(64)
    store = make_store(out, limit=1)
    store.save(1, model=model, optimizer=optimizer, run_state={}, wait=False)
    store.wait()
    real = writing._HashingStream._put

    def full(self: Any, data: Any) -> int:
        if self.length > 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, data)

    if dist.get_rank() == 1:
        writing._HashingStream._put = full
    store.save(2, model=model, optimizer=optimizer, run_state={}, wait=False)
    while store.poll() == "running":
        time.sleep(0.01)
    polled = store.poll()
    dist.barrier()  # rank 0 removes the temporary folder before its save is over; others do not wait
    left = sorted(path.name for path in store.folder.iterdir())
    dist.barrier()
    try:
        store.wait()
        message = ""
    except UserError as error:
        message = str(error)
    writing._HashingStream._put = real
    store.save(3, model=model, optimizer=optimizer, run_state={}, wait=False)
    return {"polled": polled, "message": message, "left": left, "third": store.wait(), "after": store.poll()}


def test_a_full_disk_of_one_rank_fails_the_save_on_all_and_the_next_one_works(ranks, tmp_path):
    found = ranks.run(2, fail_once, tmp_path)
    for seen in found:
        assert seen["polled"] == "failed" and seen["left"] == ["global_step_1", "latest"]
        assert "global_step_2" in seen["message"] and "rank 1" in seen["message"]
        assert "No space left" in seen["message"] and "MiB are free" in seen["message"]
        assert seen["third"].name == "global_step_3" and seen["after"] == "idle"
    assert found[0]["message"] == found[1]["message"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["global_step_3", "latest"]


def test_a_failure_that_nobody_waits_for_is_said_at_the_end(tmp_path, caplog):
    import torch

    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    store = make_store(tmp_path)
    store.save(1, model=torch.nn.Linear(2, 2), optimizer=None, run_state={}, wait=False)
    store.close()
    assert "checkpoints" in caplog.text and store.poll() == "idle"
    store.save(2, model=torch.nn.Linear(2, 2), optimizer=None, run_state={}, wait=False)
    with pytest.raises(UserError, match="checkpoints"):
        store.save(3, model=torch.nn.Linear(2, 2), optimizer=None, run_state={})


def test_a_store_without_a_group_for_it_refuses_to_save_beside_the_training(tmp_path):
    import torch

    with pytest.raises(ValueError, match="background group"):
        CheckpointStore(tmp_path, save_total_limit=None).save(
            1, model=torch.nn.Linear(2, 2), optimizer=None, run_state={}, wait=False
        )


ENDING = """
import sys, torch
from pathlib import Path
from shardyard.checkpoint import CheckpointStore
from shardyard.checkpoint.store import background_group
model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4)))
store = CheckpointStore(Path(sys.argv[1]), save_total_limit=2, background=background_group)
store.save(1, model=model, optimizer=None, run_state={"step": 1}, wait=False)
"""
ENDINGS = {
    "the end": ("", 0),
    "an error": ("1 / 0", 1),
    "Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT),
}


@pytest.mark.parametrize(
    "ending", ["Ctrl-C", *(pytest.param(one, marks=pytest.mark.soak) for one in ("the end", "an error"))]
)
def test_an_interpreter_that_ends_waits_for_the_save(tmp_path, ending):
    code, status = ENDINGS[ending]
    found = subprocess.run(
        [sys.executable, "-c", ENDING + code, str(tmp_path)], check=False, capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == status, found.stderr
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step_1", "latest"] and fault_of(tmp_path / "checkpoints" / names[0]) is None


def train_while_saving(out: Path) -> tuple[float, float, float]:
    """The longest pause of a Python thread in seconds: alone, and while 64 MB are written and hashed."""
    import torch

    model = torch.nn.Linear(4000, 4000)
    store = make_store(out)

    def longest(until: Any) -> float:
        pauses, last = [0.0], time.perf_counter()
        while not until():
            time.sleep(0)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now
        return max(pauses)

    started = time.perf_counter()
    store.save(1, model=model, optimizer=None, run_state={}, wait=False)
    copied = time.perf_counter() - started
    busy = longest(lambda: store.poll() != "running")
    total = time.perf_counter() - started
    store.close()
    return copied, busy, total


@pytest.mark.soak
def test_the_thread_that_saves_lets_others_run(ranks, tmp_path):
    """Pauses stay far below the time of the save: hashing and writing let go of the interpreter."""
    copied, busy, total = ranks.run(1, train_while_saving, tmp_path)[0]
    assert copied < total / 2 and busy < max(total / 3, 0.1), (copied, busy, total)
