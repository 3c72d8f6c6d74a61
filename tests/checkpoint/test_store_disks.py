"""Nodes with disks of their own, small and full disks, and what a run is told before its first step."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import local_values, overwrite, small_model

from shardyard.checkpoint import CheckpointStore
from shardyard.checkpoint.manifest import verify
from shardyard.checkpoint.space import check_space, estimate
from shardyard.errors import UserError


def node_of(out: Path, per_node: int) -> Path:
    """This rank's output_dir: ``per_node`` ranks see the same one."""
    import torch.distributed as dist

    return out / f"node{dist.get_rank() // per_node}"


def save_on_nodes(out: Path, per_node: int, steps: list[int], wait: bool, limit: int | None) -> Any:
    from shardyard.checkpoint.store import background_group

    model, optimizer = small_model(12)
    store = CheckpointStore(node_of(out, per_node), save_total_limit=limit, background=background_group)
    for step in steps:
        overwrite(model, optimizer, float(step))
        store.save(
            step, model=model, optimizer=optimizer, run_state={"step": step}, wait=wait,
            best=step == steps[0],
            assets=lambda folder: (folder / "config.json").write_text("{}"),
        )  # fmt: skip
    store.wait()
    return store.point_best(steps[-1]), store.best() == store.latest()


def load_on_nodes(out: Path, per_node: int) -> Any:
    model, optimizer = small_model(12)
    store = CheckpointStore(node_of(out, per_node), save_total_limit=None)
    try:
        found = store.load_latest(model=model, optimizer=optimizer)
    except UserError as error:
        return str(error)
    return found and (
        found.run_state["step"],
        {float(v.flat[0]) for v in local_values(model, optimizer).values()},
    )


def listed(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_nodes_with_disks_of_their_own_keep_what_their_ranks_hold(ranks, tmp_path, wait):
    answers = ranks.run(4, save_on_nodes, tmp_path, 2, [1, 2, 3], wait, 1)
    assert answers == [(True, True)] * 4
    for node, own in enumerate((["__0_0.distcp", "__1_0.distcp"], ["__2_0.distcp", "__3_0.distcp"])):
        folder = tmp_path / f"node{node}" / "checkpoints"
        assert listed(folder) == ["best", "global_step_1", "global_step_3", "latest"]
        path = folder / "global_step_3"
        assert listed(path) == [".metadata", *own, "assets", "manifest.json", "run_state.json"]
        held = json.loads((path / "manifest.json").read_text())
        shared = [".metadata", "assets/config.json", "run_state.json"]
        assert sorted(held["files"]) == sorted([*own, *shared]) and len(held["elsewhere"]) == 2
        assert not set(own) & set(held["elsewhere"]) and (held["sequence"], held["ranks"]) == (3, 4)
        assert verify(path) == []
    assert ranks.run(4, load_on_nodes, tmp_path, 2) == [(3, {3.0})] * 4


def test_what_one_node_lacks_is_not_latest_on_any(ranks, tmp_path):
    ranks.run(4, save_on_nodes, tmp_path, 2, [1, 2, 3], True, None)
    shutil.rmtree(tmp_path / "node1" / "checkpoints" / "global_step_3")
    victim = tmp_path / "node1" / "checkpoints" / "global_step_2" / "__3_0.distcp"
    data = bytearray(victim.read_bytes())
    data[-200] ^= 1
    assert ranks.run(4, load_on_nodes, tmp_path, 2) == [(2, {2.0})] * 4
    victim.write_bytes(data)
    assert ranks.run(4, load_on_nodes, tmp_path, 2) == [(1, {1.0})] * 4


def test_another_layout_says_what_is_missing_and_reads_joined_folders(ranks, tmp_path):
    ranks.run(2, save_on_nodes, tmp_path, 1, [5], True, None)
    one, other = (tmp_path / f"node{n}" / "checkpoints" / "global_step_5" for n in (0, 1))
    message = ranks.run(1, load_on_nodes, tmp_path, 1)[0]
    assert "needs __1_0.distcp" in message and "copy the folders of all nodes together" in message
    shutil.copytree(other, one, dirs_exist_ok=True)
    assert ranks.run(1, load_on_nodes, tmp_path, 1) == [(5, {5.0})]
    found = ranks.run(3, load_on_nodes, tmp_path, 3)
    assert [values for _, values in found] == [{5.0}, {5.0}, {5.0}]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes in the host's memory, for those who may mount one (root)."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 2)  # MNT_DETACH


def fill_disk(out: Path, wait: bool, inject: int | None) -> list[str | None]:
    """Two saves of 1.2 MB; with ``inject`` the writes of a rank fail after so many bytes."""
    from shardyard.checkpoint import writing
    from shardyard.checkpoint.store import background_group

    model, optimizer = small_model(224)
    store = CheckpointStore(out, save_total_limit=None, background=background_group)
    written = [0]  # of this rank
    real = writing._HashingStream._put

    def write(self: Any, data: Any) -> int:
        written[0] += len(data)
        if inject is not None and written[0] > inject:
            raise OSError(28, os.strerror(28))
        return real(self, data)

    writing._HashingStream._put = write
    messages = []
    for step in (1, 2):
        try:
            store.save(step, model=model, optimizer=optimizer, run_state={"step": step}, wait=wait)
            store.wait()
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages


def assert_first_is_whole(out: Path, answers: list[list[str | None]]) -> None:
    for first, second in answers:
        assert first is None and second is not None
        assert "global_step_2" in second and "MiB are free" in second and second == answers[0][1]
    assert listed(out / "checkpoints") == ["global_step_1", "latest"]
    assert verify(out / "checkpoints" / "global_step_1") == []


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_of_one_and_a_half_checkpoints_keeps_the_first_whole(ranks, tmp_path, wait):
    """2 matrices of 224 x 224, each with two moments, in fp32: 1.2 MB. Where nothing can be mounted the
    writes fail at the same place by themselves."""
    size = 2 * 3 * 224 * 224 * 4
    try:
        with small_disk(tmp_path / "disk", size * 3 // 2) as out:
            assert_first_is_whole(out, ranks.run(2, fill_disk, out, wait, None))
    except PermissionError:
        out = tmp_path / "disk"
        assert_first_is_whole(out, ranks.run(2, fill_disk, out, wait, size * 3 // 4))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("place", ["run_state.json", "manifest.json", "latest", "assets"])
def test_a_disk_that_fills_after_the_tensors_fails_the_save_as_well(tmp_path, monkeypatch, place, wait):
    import torch

    from shardyard.checkpoint import folder, manifest, publishing

    store = CheckpointStore(tmp_path, save_total_limit=1, background=lambda: None)
    model = torch.nn.Linear(2, 2)
    store.save(1, model=model, optimizer=None, run_state={})
    for module in (folder, manifest, publishing):
        real = module.write_durably

        def write(path: Path, text: str, real: Any = real) -> None:
            if place in path.name:
                raise OSError(28, os.strerror(28), str(path))
            real(path, text)

        monkeypatch.setattr(module, "write_durably", write)

    def assets(home: Path) -> None:
        if place == "assets":
            raise OSError(28, os.strerror(28), str(home))

    with pytest.raises(UserError, match=r"global_step_2: .*No space left on device.*MiB are free there"):
        store.save(2, model=model, optimizer=None, run_state={}, wait=wait, assets=assets)
        store.wait()
    assert [name for name in listed(tmp_path / "checkpoints") if "step" in name] == ["global_step_1"]
    assert verify(tmp_path / "checkpoints" / "global_step_1") == []


def sizes(_: None) -> tuple[int, int, int]:
    import torch

    model, optimizer = small_model(12, layers=3)
    before = estimate(model, torch.optim.AdamW(model.parameters()))
    frozen = torch.optim.AdamW([next(iter(model.parameters()))])
    return before, estimate(model, optimizer), estimate(model, frozen)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_estimate_counts_weights_buffers_moments_and_counters(ranks, world_size):
    """3 matrices of 12 x 12 fp32, each with two moments and a counter of 4 bytes; a buffer of one int64."""
    matrix = 12 * 12 * 4
    wanted = 3 * (3 * matrix + 4) + 8
    for before, after, frozen in ranks.run(world_size, sizes, None):
        assert before == after == wanted
        assert frozen == 3 * matrix + 8 + 2 * matrix + 4
    assert ranks.run(1, sizes, None, init_process_group=False)[0][0] == wanted


def test_the_estimate_is_what_is_written_but_for_headers(ranks, tmp_path):
    ranks.run(2, save_on_nodes, tmp_path, 2, [1], True, None)
    found = json.loads((tmp_path / "node0" / "checkpoints" / "global_step_1" / "manifest.json").read_text())
    written = sum(facts["bytes"] for name, facts in found["files"].items() if name.endswith(".distcp"))
    wanted = 2 * (3 * 12 * 12 * 4 + 4) + 8
    pieces = 2 * 3 * 2 + 2 + 1  # matrices and moments on both ranks, two counters and a buffer on one
    assert wanted < written < wanted + pieces * 1700


Usage = namedtuple("Usage", "total used free")


def space_with(monkeypatch: pytest.MonkeyPatch, folder: Path, free: int, keep: int | None) -> Any:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, free))
    return check_space(folder, 2**30, keep=keep)


def test_space_is_told_with_the_rate_that_was_measured(monkeypatch, tmp_path):
    space = space_with(monkeypatch, tmp_path / "out" / "checkpoints", 10 * 2**30, 3)
    assert space.warning is None and space.room == 10 and space.bytes_per_s > 0
    assert str(space).startswith("a checkpoint is 1.0 GiB, about ") and "10.0 GiB free, room for 10" in str(
        space
    )
    assert listed(tmp_path / "out" / "checkpoints") == []


@pytest.mark.parametrize(
    ("free_gib", "keep", "held", "wanted"),
    [
        (4.0, 3, 0, None),  # three and the next one, which is complete before the oldest goes
        (3.9, 3, 0, "save_total_limit: 2"),
        (1.0, 1, 0, "Free some space"),
        (2.0, 3, 2, None),  # two of the four are there
        (1.0, 3, 3, None),
        (1.0, None, 0, None),
        (1.0, 0, 0, None),
    ],
)
def test_the_limit_needs_room_for_one_more(monkeypatch, tmp_path, free_gib, keep, held, wanted):
    for step in range(held):
        path = tmp_path / f"global_step_{step}"
        path.mkdir()
        (path / "manifest.json").write_text('{"format": 1, "files": {}}')
    warning = space_with(monkeypatch, tmp_path, int(free_gib * 2**30), keep).warning
    assert warning is None if wanted is None else wanted in warning


def test_a_disk_without_room_for_one_or_that_cannot_be_written_ends_the_run_at_once(monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"takes 1\.0 GiB.*1023\.0 MiB free: none could be saved"):
        space_with(monkeypatch, tmp_path / "a", 2**30 - 2**20, 3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        check_space(tmp_path / "file" / "checkpoints", 1, keep=3)


def look_on_nodes(out: Path, full: int) -> Any:
    import torch.distributed as dist

    from shardyard.checkpoint import space

    if dist.get_rank() == full:
        space.shutil.disk_usage = lambda _: Usage(1, 1, 10)  # pyright: ignore[reportAttributeAccessIssue]
    model, optimizer = small_model(12)
    store = CheckpointStore(node_of(out, 1), save_total_limit=3)
    try:
        return store.check_space(model, optimizer).size
    except UserError as error:
        return str(error)


def test_every_disk_is_looked_at_for_its_share(ranks, tmp_path):
    whole = 2 * (3 * 12 * 12 * 4 + 4) + 8
    assert ranks.run(2, look_on_nodes, tmp_path, -1) == [whole // 2] * 2
    for message in ranks.run(2, look_on_nodes, tmp_path, 1):
        assert "node1" in message and "none could be saved" in message
    assert [listed(tmp_path / f"node{n}") for n in (0, 1)] == [[], []]
