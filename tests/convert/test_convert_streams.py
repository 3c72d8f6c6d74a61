"""A conversion holds a tensor or two, never a model; several workers write the same files as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.conversions import held_in
from support.live_memory import LivePeak
from support.models import write_tiny_model

from shardyard.errors import UserError


def make_model(folder: Path, layers: int = 12) -> int:
    """A dense model of equal matrices; bytes of the largest."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "dtype": "float32"}')
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{n}.mlp.up_proj.weight": torch.randn(400, 500, generator=generator)
        for n in range(layers)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return 400 * 500 * 4


def resident(field: str) -> int:
    """Bytes, by /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def host_bytes(live) -> int:
    """Of what `LivePeak` follows, the tensors in memory: those on meta have sizes and no bytes."""
    import torch

    live._alive = {key: ref for key, ref in live._alive.items() if not ref.expired()}
    storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in live._alive)
    return sum(
        storage.nbytes() for storage in storages if storage is not None and storage.device.type == "cpu"
    )


def measure(source: Path, target: Path, warm: Path, to: str, **options) -> tuple[int, int]:
    """Bytes of tensors alive at the peak of a conversion; and by how much memory grew at the peak of another,
    after a small model (``warm``) has brought in code.
    """
    from shardyard.convert.dcp import DcpWeights
    from shardyard.convert.dcp_writer import write_dcp
    from shardyard.convert.hf import HfWeights
    from shardyard.convert.hf_writer import write_hf

    def weights_of(folder: Path):
        return DcpWeights(folder) if (folder / ".metadata").exists() else HfWeights(folder)

    write = write_hf if to == "hf" else write_dcp
    write(weights_of(warm), target.with_name("warm-result"), side_dir=options["side_dir"])
    weights = weights_of(source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    write(weights, target.with_name("cold-result"), **options)
    grown = resident("VmHWM") - before
    shutil.rmtree(target.with_name("warm-result"))
    shutil.rmtree(target.with_name("cold-result"))
    live = LivePeak()
    live.now = lambda: host_bytes(live)
    with live:
        write(weights, target, **options)
    return live.peak, grown


def test_memory_is_bounded_by_the_largest_tensor(ranks, tmp_path):
    """Forty tensors of 0.8 MB: from file to file one is alive at a time."""
    largest = make_model(tmp_path / "source", layers=40)
    make_model(tmp_path / "warm", layers=1)
    live, grown = ranks.run(
        1, measure, tmp_path / "source", tmp_path / "hf", tmp_path / "warm", "hf",
        side_dir=tmp_path / "source", shard_bytes=10**6, init_process_group=False,
    )[0]  # fmt: skip
    assert largest <= live <= 2 * largest
    assert grown <= 4 * largest < 40 * largest / 8


@pytest.mark.parametrize("layers", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_memory_of_joined_experts_is_bounded_too(ranks, tmp_path, layers):
    """Of experts that the model joins, the largest tensor is the joined one, [8, 2 * 128, 256] in fp32."""
    source = write_tiny_model(
        tmp_path / "source", "qwen3_moe", num_experts=8, moe_intermediate_size=128, hidden_size=256,
        num_hidden_layers=layers,
    )  # fmt: skip
    warm = write_tiny_model(tmp_path / "warm", "qwen3_moe")
    joined = 8 * 2 * 128 * 256 * 4
    everything = sum(len(data) for _, _, data in held_in(source).values())
    for before, after, to in ((source, tmp_path / "dcp", "dcp"), (tmp_path / "dcp", tmp_path / "hf", "hf")):
        live, grown = ranks.run(
            1, measure, before, after, warm, to, side_dir=source, init_process_group=False
        )[0]
        assert joined <= live <= 3 * joined < everything / 3
        # What the allocator keeps of freed memory does not grow with the model: 15 MB for 12 and 40 layers.
        assert grown <= 9 * joined and (layers < 20 or 9 * joined < everything / 3)
    assert held_in(tmp_path / "hf") == held_in(source)


def test_workers_write_what_one_process_writes(tmp_path):
    """New processes, each with some of the files; a worker that fails ends all with its message."""
    from shardyard.convert.hf import HfWeights
    from shardyard.convert.hf_writer import write_hf

    make_model(tmp_path / "source", layers=4)
    weights = HfWeights(tmp_path / "source")
    write_hf(weights, tmp_path / "one", shard_bytes=10**6)
    write_hf(weights, tmp_path / "two", shard_bytes=10**6, workers=2)
    assert held_in(tmp_path / "two") == held_in(tmp_path / "one")
    names = [path.name for path in sorted((tmp_path / "one").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "two").iterdir())] and len(names) == 6
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.soak
def test_a_fault_in_a_worker_ends_all_with_its_message(tmp_path):
    from shardyard.convert.hf import HfWeights
    from shardyard.convert.hf_writer import write_hf

    make_model(tmp_path / "source")
    weights = HfWeights(tmp_path / "source")
    path = tmp_path / "source/model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    with pytest.raises(UserError, match=re.escape(f"model.safetensors is cut short: {last} has")):
        write_hf(weights, tmp_path / "out", shard_bytes=10**6, workers=3)
    assert not list((tmp_path / "out").glob("*.tmp-*")) and not list((tmp_path / "out").glob("*.index.json"))


COMMAND = """
import sys
from pathlib import Path
from shardyard.convert.hf import HfWeights
from shardyard.convert.hf_writer import write_hf
if __name__ == "__main__":
    write_hf(HfWeights(Path(sys.argv[1])), Path(sys.argv[2]), shard_bytes=10**6, workers=2)
"""


@pytest.mark.soak
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_workers_end_with_a_killed_command_and_the_next_one_goes_on(tmp_path, after):
    make_model(tmp_path / "source", layers=40)
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(COMMAND)
    words = [sys.executable, str(script), str(tmp_path / "source"), str(out)]
    process = subprocess.Popen(words)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*.safetensors"))) < after and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)  # the kernel ends the workers
    left = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    time.sleep(1)
    assert left == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    subprocess.run(words, check=True)
    assert held_in(out) == held_in(tmp_path / "source") and len(list(out.iterdir())) == 42
