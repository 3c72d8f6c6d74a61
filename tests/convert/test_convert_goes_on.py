"""A conversion that is killed, or whose disk is full, goes on from its finished files, never looking done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.conversions import DictWeights, held_in
from support.models import write_tiny_model
from support.ranks import RankFailure

from shardyard.checkpoint import fault_of
from shardyard.errors import UserError


class Deadly:
    """Weights that kill their process when the tensor number ``after`` is read."""

    def __init__(self, weights, after: int) -> None:
        self._weights, self._left = weights, after
        self.folder, self.config, self.facts = weights.folder, weights.config, weights.facts

    def read(self, name: str):
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._weights.read(name)


def write(weights, target: Path, to: str) -> None:
    from shardyard.convert.dcp_writer import write_dcp
    from shardyard.convert.hf_writer import write_hf

    if to == "hf":
        write_hf(weights, target, shard_bytes=25_000)
    else:
        write_dcp(weights, target, part_bytes=25_000)


def die(source: Path, target: Path, to: str, after: int, last_words: str = "") -> None:
    """Kill at a tensor, or where the journal is told of ``last_words``."""
    from shardyard.convert import journal
    from shardyard.convert.hf import HfWeights

    tensors = 10**9 if last_words else after
    if last_words:
        method = getattr(journal.Journal, last_words)

        def dying(self, *args, **facts):
            if last_words == "complete" or len(self.finished) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args, **facts)

        setattr(journal.Journal, last_words, dying)
    write(Deadly(HfWeights(source), tensors), target, to)


def looks_complete(folder: Path, to: str) -> bool:
    return (
        (folder / "model.safetensors.index.json").exists() or (folder / "model.safetensors").exists()
        if to == "hf"
        else fault_of(folder) is None
    )


def kill_and_go_on(ranks, tmp_path, to: str, after: int, last_words: str = "") -> tuple[int, int]:
    """Tensors read by the second run, and in all; the result is that of an unbroken run."""
    from shardyard.convert.dcp import DcpWeights
    from shardyard.convert.hf import HfWeights

    source, target = write_tiny_model(tmp_path / "source", "qwen3_moe"), tmp_path / "out"
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks.run(1, die, source, target, to, after, last_words, init_process_group=False)
    assert last_words == "complete" or not looks_complete(target, to)
    rows = map(json.loads, (target / ".conversion.jsonl").read_text().splitlines()[1:])
    kept = {row["file"]: (target / row["file"]).stat().st_mtime_ns for row in rows}
    weights = HfWeights(source)
    counting = DictWeights(source, {name: weights.read(name) for name in weights.facts}, weights.config)
    counting.facts = weights.facts
    write(counting, target, to)
    for name, written in kept.items():
        assert (target / name).stat().st_mtime_ns == written, f"{name} was written twice"
    if to == "dcp":
        assert fault_of(target) is None
        again = DcpWeights(target)
        assert {name: again.read(name).tolist() for name in again.facts} == {
            name: tensor.tolist() for name, tensor in counting.tensors.items()
        }
    else:
        assert held_in(target) == held_in(source)
    assert not [p.name for p in target.rglob("*") if ".tmp-" in p.name or p.name.startswith(".conv")]
    return len(counting.reads), len(weights.facts)


@pytest.mark.parametrize(("to", "after"), [("hf", 0), ("dcp", 30)])
def test_what_a_kill_interrupts_is_done_again_and_the_rest_is_kept(ranks, tmp_path, to, after):
    read, total = kill_and_go_on(ranks, tmp_path, to, after)
    assert read == total if after == 0 else 0 < read < total


@pytest.mark.parametrize(
    ("to", "after", "last_words"),
    [("hf", 1, "record"), ("hf", 0, "complete"), ("dcp", 1, "record"), ("dcp", 0, "complete")],
)
def test_a_kill_between_a_file_and_the_journal_and_at_the_very_end(ranks, tmp_path, to, after, last_words):
    read, total = kill_and_go_on(ranks, tmp_path, to, after, last_words)
    assert read == 0 if last_words == "complete" else 0 < read < total


@pytest.mark.soak
@pytest.mark.parametrize("after", range(45))
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_kill_at_every_tensor(ranks, tmp_path, to, after):
    kill_and_go_on(ranks, tmp_path, to, after)


def started(tmp_path: Path, finished: int = 1) -> tuple[DictWeights, Path]:
    """A conversion whose disk was full after ``finished`` files."""
    import torch

    from shardyard.convert.hf_writer import write_hf

    tensors = {f"layers.{n}.weight": torch.full((100,), float(n)) for n in range(4)}
    weights = DictWeights(tmp_path / "source", tensors, {"dtype": "float32"})
    (weights.folder / "config.json").write_text("{}")
    write_once = weights.read

    def full(name: str):
        if len(weights.reads) == finished:
            raise OSError(28, "No space left on device")
        return write_once(name)

    weights.read = full
    with pytest.raises(UserError, match=r"No space left on device.*MiB are free there"):
        write_hf(weights, tmp_path / "out", shard_bytes=400)
    weights.read = write_once
    weights.reads.clear()
    return weights, tmp_path / "out"


def test_a_full_disk_keeps_finished_files_and_says_so(tmp_path):
    from shardyard.convert.hf_writer import write_hf

    weights, out = started(tmp_path)
    left = sorted(path.name for path in out.iterdir())
    assert left == [".conversion.jsonl", "model-00001-of-00004.safetensors"]
    write_hf(weights, out, shard_bytes=400)
    assert weights.reads == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]
    assert {name: data[2] for name, data in held_in(out).items()} == {
        name: tensor.numpy().tobytes() for name, tensor in weights.tensors.items()
    }


def test_a_full_disk_before_the_first_file_leaves_nothing(tmp_path):
    _, out = started(tmp_path, finished=0)
    assert not out.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if (
        os.geteuid()
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode
    ):
        yield None
        return
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_disk_that_is_too_small_is_seen_before_and_one_that_fills_up_meanwhile(
    tmp_path, small_disk, to, monkeypatch
):
    import torch

    from shardyard.convert import job

    source = write_tiny_model(tmp_path / "source", "qwen3", hidden_size=96)  # more than 300 kB
    target = (small_disk or tmp_path) / "out"
    if small_disk is None:  # without a disk of our own: what statvfs and write would say
        monkeypatch.setattr(job.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 200_000))
    with pytest.raises(UserError, match=r"the result takes 0\.[3-9] MiB, and 0\.[12] MiB are free there"):
        job.convert(job.Conversion(source, target, to))
    assert not target.exists()
    monkeypatch.setattr(job, "_check_space", lambda target, size: None)
    if small_disk is None:
        from shardyard.checkpoint.hf_files import FileWriter

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(FileWriter, "write", full)
        monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"(?i)no space left|cannot be written"):
        job.convert(job.Conversion(source, target, to))
    assert not target.exists() or not looks_complete(target, to)
    assert not list(target.glob("*.tmp-*"))


def test_another_job_in_the_folder_is_refused_and_named(tmp_path):
    from shardyard.convert.hf_writer import write_hf

    weights, out = started(tmp_path)
    with pytest.raises(UserError, match=r"unfinished conversion.*was shard_bytes 400, now shard_bytes 800"):
        write_hf(weights, out, shard_bytes=800)
    other = DictWeights(tmp_path / "other", weights.tensors, weights.config)
    with pytest.raises(UserError, match=r"unfinished conversion.*from .*/source.*now from .*/other"):
        write_hf(other, out, shard_bytes=400)
    (weights.folder / "config.json").write_text("{ }")
    with pytest.raises(UserError, match=r"the source has changed since"):
        write_hf(weights, out, shard_bytes=400)
    assert sorted(path.name for path in out.glob("m*")) == ["model-00001-of-00004.safetensors"]


def test_two_conversions_do_not_share_a_folder(tmp_path):
    import fcntl

    from shardyard.convert.hf_writer import write_hf

    weights, out = started(tmp_path)
    with (out / ".conversion.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is converting into"):
            write_hf(weights, out, shard_bytes=400)
    write_hf(weights, out, shard_bytes=400)


def test_a_journal_that_a_kill_cut_short_counts_up_to_there(tmp_path):
    from shardyard.convert.hf_writer import write_hf

    weights, out = started(tmp_path, finished=2)
    journal = out / ".conversion.jsonl"
    lines = journal.read_text().splitlines()
    assert len(lines) == 3
    journal.write_text("\n".join([*lines[:2], lines[2][:7]]))
    write_hf(weights, out, shard_bytes=400)
    assert weights.reads == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]
