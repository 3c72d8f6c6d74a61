"""A killed run goes on where it was; its result is that of an unbroken one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import replace as replaced
from pathlib import Path

import numpy as np
import pytest
from support.tokenizers import CHATML, byte_tokenizer

from shardyard.data.preprocess import Job, batches, run_job
from shardyard.data.preprocess.batches import Position
from shardyard.data.preprocess.merging import merge_outputs
from shardyard.data.preprocess.outcome import Outcome
from shardyard.data.preprocess.run import Pace
from shardyard.data.preprocess.spool import Spool
from shardyard.data.preprocess.texts import TextEncoder
from shardyard.data.sources import resolve_datasets
from shardyard.errors import UserError


class SlowEncoder(TextEncoder):
    """Leaves time to be killed in."""

    def __call__(self, texts):
        time.sleep(0.05)
        return super().__call__(texts)


def entries_of(folder):
    """A jsonl and a json file with 40 documents each, in batches of a few."""
    rows = [{"text": f"document {n} " + "tea in the sea " * (n % 7)} for n in range(80)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:40]), encoding="utf-8")
    (folder / "b.json").write_text(json.dumps(rows[40:]), encoding="utf-8")
    return resolve_datasets([str(folder / "a.jsonl"), str(folder / "b.json")], ".")


def job_of(folder, entries, name="out", **options):
    return Job(
        **{"kind": "text", "append_eod": True, "save_every": 0.0, "pace": Pace(2)} | options,
        entries=entries, prefix=folder / name, memo=folder / "memo.json",
    )  # fmt: skip


def outputs(result):
    return [
        prefix.with_name(prefix.name + suffix).read_bytes()
        for prefix in result.prefixes
        for suffix in (".bin", ".idx")
    ]


def start_and_kill(job, folder, segments):
    """Run the job in a process group of its own and kill all of it once so many segments are there."""

    def run():
        os.setsid()
        run_job(job, byte_tokenizer(CHATML))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < segments + 1 and time.monotonic() < deadline:  # and key.json
        assert process.is_alive(), "it ended before it could be killed"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("segments", [1, 12])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(tmp_path, monkeypatch, caplog, segments):
    monkeypatch.setattr(batches, "BATCH_BYTES", 200)
    entries = entries_of(tmp_path)
    unbroken = run_job(job_of(tmp_path, entries, "unbroken"), byte_tokenizer(CHATML))
    job = job_of(tmp_path, entries)
    folder = tmp_path / "out.partial" / "text"
    with monkeypatch.context() as slowly:
        slowly.setattr("shardyard.data.preprocess.texts.TextEncoder", SlowEncoder)
        start_and_kill(job, folder, segments)
    done = len(list(folder.glob("*.blocks")))
    assert done >= segments
    assert not (tmp_path / "out_text_document.bin").exists() and not (tmp_path / "out_manifest.json").exists()
    caplog.set_level("INFO", "shardyard.data")
    result = run_job(job, byte_tokenizer(CHATML))
    assert "that a run before this one did" in caplog.text
    assert outputs(result) == outputs(unbroken)
    assert result.counts["text"]["rows read"] == 80 and result.counts["text"]["documents"] == 80
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl", "b.json", "out_manifest.json", "out_text_document.bin", "out_text_document.idx",
        "unbroken_manifest.json", "unbroken_text_document.bin", "unbroken_text_document.idx",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "killed_at", ["out_text_document.idx", "out_other_document.bin", "out_manifest.json"]
)
def test_a_run_killed_while_its_outputs_get_their_names_goes_on(tmp_path, monkeypatch, killed_at):
    rows = [{"text": f"document {n}", "other": f"more {n}"} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries, keys = resolve_datasets([str(tmp_path / "a.jsonl")], "."), {"json_keys": ("text", "other")}
    unbroken = run_job(job_of(tmp_path, entries, "unbroken", **keys), byte_tokenizer(CHATML))
    job = job_of(tmp_path, entries, pace=Pace(1), **keys)
    replace = Path.replace

    def killing(path, target):
        if Path(target).name == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    with monkeypatch.context() as changed:
        changed.setattr(Path, "replace", killing)
        process = multiprocessing.get_context("fork").Process(
            target=run_job, args=(job, byte_tokenizer(CHATML))
        )
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "out_text_document.bin").exists()
    with pytest.raises(UserError, match="is there, but no manifest"):  # another job's outputs stay guarded
        run_job(replaced(job, append_eod=False), byte_tokenizer(CHATML))
    result = run_job(job, byte_tokenizer(CHATML))
    assert outputs(result) == outputs(unbroken) and not result.already_there
    assert not list(tmp_path.glob("out*.tmp*")) and not (tmp_path / "out.partial").exists()


def test_packs_of_a_killed_run_are_those_of_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_BYTES", 200)
    rows = [{"instruction": f"q{n}", "output": "tea " * (n % 9 + 1)} for n in range(80)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries = resolve_datasets(str(path), ".")
    options = {"kind": "sft", "append_eod": False, "seq_length": 300, "pack": True}
    unbroken = run_job(job_of(tmp_path, entries, "unbroken", **options), byte_tokenizer(CHATML))
    job = job_of(tmp_path, entries, **options)

    class Tired(Exception):
        pass

    folder = tmp_path / "out.partial" / "packed"
    add = Spool.add

    def add_some(self, *words):
        if len(list(folder.glob("*.json"))) > 5:
            raise Tired
        add(self, *words)

    with monkeypatch.context() as patched:
        patched.setattr(Spool, "add", add_some)
        with pytest.raises(Tired):
            run_job(job, byte_tokenizer(CHATML))
    assert len(list(folder.glob("*.blocks"))) == 5
    assert outputs(run_job(job, byte_tokenizer(CHATML))) == outputs(unbroken)


def an_outcome(number):
    return Outcome({"tokens": np.arange(number, dtype=np.uint16), "lengths": np.array([number], np.int32)}, 1)


def fill(folder, parts, count):
    spool = Spool(folder, parts, save_every=0.0)
    for number in range(count):
        spool.add(an_outcome(number), Position(rows=number + 1), 10)
    spool.close()


def replayed(spool):
    return [arrays["tokens"].tolist() for arrays in spool.replay()]


def test_segments_are_read_back_in_order_with_their_types(tmp_path):
    fill(tmp_path / "s", {"a": 1}, 4)
    spool = Spool(tmp_path / "s", {"a": 1})
    assert (spool.position, spool.tally.rows, spool.input_bytes) == (Position(rows=4), 4, 40)
    assert replayed(spool) == [[], [0], [0, 1], [0, 1, 2]]
    assert {arrays["tokens"].dtype for arrays in spool.replay()} == {np.dtype(np.uint16)}
    spool.close()


@pytest.mark.parametrize("harm", ["cut", "flip", "no word of it", "lost"])
def test_work_behind_a_damaged_segment_is_done_again(tmp_path, harm):
    folder = tmp_path / "s"
    fill(folder, {"a": 1}, 4)
    blocks, told = folder / "000002.blocks", folder / "000002.json"
    content = blocks.read_bytes()
    if harm == "cut":
        blocks.write_bytes(content[:-1])
    elif harm == "flip":
        blocks.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (told if harm == "no word of it" else blocks).unlink()
    spool = Spool(folder, {"a": 1})
    assert spool.position == Position(rows=2) and spool.tally.rows == 2
    assert replayed(spool) == [[], [0]]
    assert sorted(path.name for path in folder.iterdir()) == [
        "000000.blocks", "000000.json", "000001.blocks", "000001.json", "key.json", "lock",
    ]  # fmt: skip
    spool.close()


def test_work_of_another_key_is_thrown_away_with_the_reason(tmp_path):
    fill(tmp_path / "s", {"--append-eod": True, "x": 1}, 2)
    spool = Spool(tmp_path / "s", {"--append-eod": False, "x": 1})
    assert spool.position == Position() and replayed(spool) == []
    assert spool.taken_over.endswith("is thrown away: --append-eod was True, is False")
    spool.close()


def test_two_runs_do_not_share_a_folder(tmp_path):
    spool = Spool(tmp_path / "s", {})

    def another():
        with pytest.raises(UserError, match="another preprocess is writing there"):
            Spool(tmp_path / "s", {})

    process = multiprocessing.get_context("fork").Process(target=another)
    process.start()
    process.join()
    assert process.exitcode == 0
    spool.close()
    Spool(tmp_path / "s", {}).close()


@pytest.mark.parametrize("kind", ["text", "sft"])
def test_a_disk_that_fills_up_at_any_moment_leaves_nothing_in_the_way(tmp_path, monkeypatch, kind):
    rows = [{"text": f"tea {n}", "other": "sea", "instruction": f"q{n}", "output": "r"} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries = resolve_datasets([str(tmp_path / "a.jsonl")], ".")
    options = {"json_keys": ("text", "other")} if kind == "text" else {"kind": "sft", "append_eod": False}
    job, tokenizer = job_of(tmp_path / "new", entries, pace=Pace(1), **options), byte_tokenizer(CHATML)
    fsync, calls, room = os.fsync, [], 0

    def filling(descriptor):
        calls.append(descriptor)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", filling)
    for number in range(100):
        room = number
        calls.clear()
        try:
            result = run_job(job, tokenizer)
            break
        except UserError as error:
            assert "No space left on device" in str(error)
            assert [path.name for path in tmp_path.iterdir() if path.name != "memo.json"] == ["a.jsonl"]
    assert room == len(calls) > 8 and not result.already_there
    assert all(path.stat().st_size for path in (tmp_path / "new").iterdir())


def test_a_write_that_fails_again_when_the_file_is_closed_is_one_line(tmp_path):
    """What did not fit waits in the file's buffer, and closing the file writes it once more."""
    spool = Spool(tmp_path / "spool", {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write"):
            spool.add(Outcome({"tokens": np.arange(9)}, 1), Position(), 1)
            spool.commit()
        spool.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on the size of files fails as a full disk does, in the middle of a write."""
    rows = [{"text": "tea " * 3000} for _ in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = job_of(tmp_path, resolve_datasets(str(path), "."), "new/deep/out", pace=Pace(1), save_every=60.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*; free space there"):
            run_job(job, byte_tokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_merge_of_packed_samples_killed_between_two_parts_leaves_no_mixture(tmp_path, monkeypatch):
    rows = [{"instruction": f"q{n}", "output": "tea"} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entries, sft = resolve_datasets([str(tmp_path / "a.jsonl")], "."), {"kind": "sft", "append_eod": False}
    for name in ("first", "second"):
        run_job(job_of(tmp_path, entries, name, pace=Pace(1), **sft), byte_tokenizer(CHATML))
    sets = [tmp_path / "first", tmp_path / "second"]
    merge_outputs(sets[:1], tmp_path / "all")
    replace = Path.replace

    def failing(path, target):
        if Path(target).name == "all_packed_labels_document.bin":
            raise error(errno.ENOSPC, os.strerror(errno.ENOSPC)) if error is OSError else error
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    error = KeyboardInterrupt  # stands for whatever ends a process without a word
    with pytest.raises(KeyboardInterrupt):
        merge_outputs(sets, tmp_path / "all", overwrite=True)
    assert not (tmp_path / "all_packed_labels_document.idx").exists()
    error = OSError
    with pytest.raises(UserError, match="No space left on device"):
        merge_outputs(sets, tmp_path / "all", overwrite=True)
    assert not list(tmp_path.glob("all*"))
