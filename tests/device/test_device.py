"""The device room: what it is told by the launcher, and how ranks talk besides tensors."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shardyard.device import Device, detect_device, device, visible_accelerators
from shardyard.errors import UserError

PACKAGE = Path(device.__file__).parents[1]


def test_a_cpu_machine_takes_any_number_of_ranks(monkeypatch):
    if visible_accelerators()[0] == "cpu":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
        assert detect_device() == Device("cpu")


def test_more_local_ranks_than_devices_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(device, "visible_accelerators", lambda: ("npu", 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"3 ranks.*2 npu"):
        detect_device()


def test_each_rank_takes_its_own_device(monkeypatch):
    monkeypatch.setattr(device, "visible_accelerators", lambda: ("cuda", 8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "5")
    found = detect_device()
    assert found == Device("cuda", 5) and found.backend == "cpu:gloo,cuda:nccl"
    assert found.default_param_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("pattern", "library", "variable"),
    [
        ("/dev/davinci", "CANN set_env.sh", "ASCEND_RT_VISIBLE_DEVICES"),
        ("/dev/nvidia", "CUDA", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_hardware_without_its_library_is_never_a_silent_cpu(monkeypatch, pattern, library, variable):
    monkeypatch.setattr(
        device.glob, "glob", lambda wanted: [pattern + "0"] if wanted.startswith(pattern) else []
    )
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=library):
        visible_accelerators()
    monkeypatch.setenv(variable, "")  # the user hides the devices: then it is the CPU, as asked
    assert visible_accelerators() == ("cpu", 0)


def test_seeding_covers_every_generator():
    def draws():
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    Device("cpu").seed(5)
    first = draws()
    assert draws() != first
    Device("cpu").seed(5)
    assert draws() == first


def test_peak_memory_of_a_cpu_is_the_resident_peak_in_bytes():
    allocated, reserved = Device("cpu").peak_memory()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert allocated == reserved == pytest.approx(kib * 1024, rel=0.01)


def conversation_of_ranks():
    from shardyard.device import start_process_group

    group = start_process_group(Device("cpu"), timeout_minutes=1)
    rows = group.gather([group.rank, 0.5, float("nan") if group.rank == 1 else 2.0**53 + 0.0])
    if group.is_main:
        group.publish("greeting", "hello, 世界")
    word = group.wait("greeting")
    objects = group.gather_objects({"rank": group.rank})
    group.stop()
    return rows.tolist(), word, objects, group.local_rank


def test_ranks_share_numbers_and_words(ranks):
    for rank, (rows, word, objects, local) in enumerate(
        ranks.run(2, conversation_of_ranks, init_process_group=False)
    ):
        assert rows[0] == [0.0, 0.5, 2.0**53]
        assert rows[1][:2] == [1.0, 0.5] and rows[1][2] != rows[1][2]
        assert word == "hello, 世界" and objects == [{"rank": 0}, {"rank": 1}] and local == rank


def alone():
    from shardyard.device import start_process_group

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    group = start_process_group(Device("cpu"))
    group.publish("k", "v")
    return group.world_size, group.gather([3.0]).tolist(), group.wait("k")


def test_without_a_launcher_there_is_one_rank(ranks):
    assert ranks.run(1, alone, init_process_group=False)[0] == (1, [[3.0]], "v")


def test_no_other_room_names_a_device():
    """Outside device/, ops/ and plan/ nothing calls torch.cuda or names a vendor's library.

    The list of package versions in `shardyard env` is a report, that of packages whose objects in a foreign
    pickle become inert only names them; `optimization` names implementations of ops/ as values of a setting.
    """
    named = re.compile(r"torch\.(cuda|npu)\b|torch_npu|[\"'](nccl|hccl|cuda|npu)[\"']")
    only_named = {"cli/env.py", "convert/mcore/pickles.py", "config/sections/optimization.py"}
    rooms = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in {"device", "ops", "plan"}
        and path.relative_to(PACKAGE).as_posix() not in only_named
    ]
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in rooms
        for line in path.read_text("utf-8").splitlines()
        if named.search(line)
    ]
    assert not found
