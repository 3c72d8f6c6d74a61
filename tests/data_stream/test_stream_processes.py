"""Windows and processes: each made once, whoever dies; what a run leaves behind; the look-ahead."""

import fcntl
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_stream.streams import NumberEncoder, batches, by_epoch, make_config, open_numbers, write_rows

from shardyard.data.batches import BatchLoader
from shardyard.data.sources import resolve_datasets
from shardyard.data.stream import locks
from shardyard.data.stream.build import make_maker
from shardyard.data.stream.cache import WindowCache, _Waiting
from shardyard.data.stream.run_folder import RunFolder
from shardyard.data.stream.tokenise import Conversations
from shardyard.errors import UserError

FORK = multiprocessing.get_context("fork")


class LoggedMaker:
    """Notes which process makes which window, and takes its time over it."""

    unit = "rows"

    def __init__(self, maker, log: Path, seconds: float):
        self._maker, self._log, self._seconds = maker, log, seconds

    def make(self, epoch, window, workers=1):
        with self._log.open("a") as file:
            file.write(json.dumps([os.getpid(), epoch, window]) + "\n")
        made = self._maker.make(epoch, window, workers)
        time.sleep(self._seconds)
        return made

    def made(self):
        if not self._log.exists():
            return []
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]


def make_cache(folder, rows=20, buffer_size=4, seconds=0.0):
    name = write_rows(folder / "rows.jsonl", range(1, 1 + rows))
    config = make_config(folder, [name], buffer_size=buffer_size)
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    maker = make_maker(config, entries, Conversations(entries, NumberEncoder(), capacity=None))
    return WindowCache(folder / "windows", LoggedMaker(maker, folder / "made.log", seconds))


def numbers_in(window):
    return sorted(int(window.sample(n).input_ids[0]) for n in range(window.num_samples))


def read_all(cache, epochs, answers):
    found = []
    for epoch in range(epochs):
        window = 0
        while (opened := cache.get(epoch, window)) is not None:
            found.append(numbers_in(opened))
            window += 1
    answers.put(found)


def test_three_processes_that_ask_for_the_same_windows_make_each_once(tmp_path):
    cache = make_cache(tmp_path, seconds=0.02)
    answers = FORK.Queue()
    processes = [FORK.Process(target=read_all, args=(cache, 2, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    epoch = [list(range(begin, begin + 4)) for begin in range(1, 21, 4)]
    assert found == [epoch * 2] * 3
    windows = [made[1:] for made in cache.maker.made()]
    # Window 5 is the look past the last row, which shows that there is none.
    assert sorted(windows) == [(0, n) for n in range(6)] + [(1, n) for n in range(5)]
    assert cache.windows_per_epoch == 5


def get_one(cache, epoch, window):
    cache.get(epoch, window)


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def killed_in_the_middle(cache, folder, seconds_in):
    """A process that is killed while it makes window 0; the window's own files as it leaves them."""
    process = FORK.Process(target=get_one, args=(cache, 0, 0))
    process.start()
    wait_for(lambda: cache.maker.made())
    time.sleep(seconds_in)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    return process.pid


def test_another_process_takes_over_from_one_that_was_killed(tmp_path):
    cache = make_cache(tmp_path, seconds=60.0)
    pid = killed_in_the_middle(cache, tmp_path, 0.0)
    (cache.folder / f"e0-w0.window.tmp-{pid}").write_bytes(b"half")  # as one killed while writing leaves it
    cache.maker._seconds = 0.0
    began = time.monotonic()
    assert numbers_in(cache.get(0, 0)) == [1, 2, 3, 4]
    assert time.monotonic() - began < 5
    assert [made[0] for made in cache.maker.made()] == [pid, os.getpid()]
    assert sorted(file.name for file in cache.folder.iterdir()) == ["e0-w0.lock", "e0-w0.window"]


@pytest.mark.soak
@pytest.mark.parametrize("point", range(20))
def test_another_process_takes_over_at_any_point(tmp_path, point):
    """Killed at a random moment of making many windows; what is there is whole, the rest is made."""
    rng = random.Random(point)
    cache = make_cache(tmp_path, rows=120, buffer_size=3, seconds=0.002)
    answers = FORK.Queue()
    for _ in range(3):
        process = FORK.Process(target=read_all, args=(cache, 1, answers))
        process.start()
        time.sleep(rng.uniform(0.0, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
    answers = FORK.SimpleQueue()
    read_all(cache, 1, answers)
    assert [n for window in answers.get() for n in window] == list(range(1, 121))
    assert not list(cache.folder.glob("*.tmp-*"))
    made = [key[1:] for key in cache.maker.made()]
    assert set(made) == {(0, n) for n in range(41)}
    assert len(made) <= 41 + 3  # only a window that a killed process was at is made twice


def test_a_damaged_window_is_made_again(tmp_path):
    cache = make_cache(tmp_path)
    assert cache.get(0, 1) is not None
    path = cache.folder / "e0-w1.window"
    path.write_bytes(path.read_bytes()[:100])
    again = pickle.loads(pickle.dumps(cache))
    assert numbers_in(again.get(0, 1)) == [5, 6, 7, 8]


def test_waiting_is_told_every_half_minute(caplog):
    caplog.set_level(logging.INFO, "shardyard.data")
    waiting = _Waiting((2, 7))
    for seconds in range(70):
        waiting(float(seconds))
    assert len(caplog.records) == 2
    assert "waiting for window 7 of epoch 2" in caplog.text


def test_files_that_change_under_a_run_are_told(tmp_path):
    cache = make_cache(tmp_path, rows=20)
    answers = FORK.SimpleQueue()
    read_all(cache, 1, answers)
    write_rows(tmp_path / "rows.jsonl", range(1, 11))
    other = pickle.loads(pickle.dumps(cache))
    with pytest.raises(UserError, match="had 5 windows of rows and now has 3"):
        read_all(other, 2, answers)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    cache = make_cache(tmp_path)
    cache.folder = tmp_path / "file" / "windows"
    with pytest.raises(UserError, match=r"cannot write the tokenised windows to .*model\.cache_dir"):
        cache.get(0, 0)


def say_and_sleep(said):
    said.set()
    time.sleep(60)


def test_a_lock_is_not_inherited_by_a_fork(tmp_path):
    held = locks.try_lock(tmp_path / "a.lock")
    assert held is not None and locks.try_lock(tmp_path / "a.lock") is None
    said = FORK.Event()
    process = FORK.Process(target=say_and_sleep, args=(said,))
    process.start()
    assert said.wait(30)
    locks._held.remove(held)
    os.close(held._descriptor)  # what the death of this process would do
    again = locks.try_lock(tmp_path / "a.lock")
    process.kill()
    process.join()
    assert again is not None
    again.release()


def test_a_lock_on_a_file_that_was_removed_is_worth_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.lock"
    real, opened = fcntl.flock, []

    def removed_meanwhile(descriptor, operation):
        opened.append(descriptor)
        if len(opened) == 1:
            path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    held = locks.try_lock(path)
    assert held is not None and len(opened) == 2 and path.exists()
    assert locks.try_lock(path) is None
    held.release()


def test_a_runs_folder_goes_with_it_and_those_of_dead_runs_too(tmp_path):
    living = RunFolder(tmp_path, "key", "living")
    code = (
        "import os, sys; from pathlib import Path; from shardyard.data.stream.run_folder import RunFolder;"
        "RunFolder(Path(sys.argv[1]), 'other', 'dead'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (tmp_path / "other" / "young").mkdir()
    old = tmp_path / "other" / "old"
    old.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert (tmp_path / "other" / "dead").is_dir()
    mine = RunFolder(tmp_path, "key", "mine")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert left == ["key/living", "key/mine", "other/young"]
    with pytest.raises(UserError, match="belongs to another run"):
        RunFolder(tmp_path, "key", "living")
    mine.remove()
    living.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_next_windows_are_made_ahead_and_the_process_ends_with_the_stream(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 41))
    stream = open_numbers(tmp_path, [name], buffer_size=10, global_batch=3, look_ahead=True)
    assert stream.ahead is not None and stream.ahead.pid is not None
    stream.sampler.global_batch_at(0)
    wait_for(lambda: (stream.folder / "e0-w2.window").exists())
    assert not (stream.folder / "e0-w3.window").exists()
    stream.sampler.global_batch_at(2 * 2**24)  # in window 2: the last of this epoch and the first of the next
    wait_for(lambda: (stream.folder / "e1-w0.window").exists())
    assert (stream.folder / "e0-w3.window").exists()
    pid, folder = stream.ahead.pid, stream.folder
    found = by_epoch(batches(stream, 2))
    assert [sorted(numbers) for numbers in found] == [list(range(1, 41))] * 2
    stream.close()
    stream.close()
    assert not is_alive(pid) and not folder.exists()


def test_a_run_goes_on_without_the_process_that_works_ahead(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 41))
    stream = open_numbers(tmp_path, [name], buffer_size=10, global_batch=3, look_ahead=True)
    os.kill(stream.ahead.pid, signal.SIGKILL)
    assert [sorted(n) for n in by_epoch(batches(stream, 2))] == [list(range(1, 41))] * 2
    stream.close()


def test_parquet_is_read_by_parent_look_ahead_and_loader_workers_alike(tmp_path):
    """Its reader has threads, which a fork cuts off."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"instruction": str(number), "output": "r"} for number in range(1, 401)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=30)
    stream = open_numbers(tmp_path, ["a.parquet"], buffer_size=50, global_batch=8, look_ahead=True)
    batch = stream.sampler.global_batch_at(0)
    wait_for(lambda: (stream.folder / "e0-w2.window").exists())
    (stream.folder / "e0-w0.window").unlink()
    process = FORK.Process(target=get_one, args=(pickle.loads(pickle.dumps(stream.store))._cache, 0, 0))
    process.start()
    process.join(30)
    assert process.exitcode == 0 and (stream.folder / "e0-w0.window").exists()
    found = by_epoch(batches(stream, 1))
    assert sorted(found[0]) == list(range(1, 401)) and len(batch.units) == 8
    stream.close()


def is_alive(pid):
    """Whether a process runs; one that nobody has waited for is dead as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


LEADER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from data_stream.streams import open_numbers
options = {"buffer_size": 10, "look_ahead": True, "preprocessing_num_workers": 2}
stream = open_numbers(Path(sys.argv[1]), ["a.jsonl"], **options)
stream.sampler.global_batch_at(0)
print(stream.ahead.pid, flush=True)
time.sleep(float(sys.argv[3]))
raise SystemExit(3)
"""


def start_leader(folder, seconds):
    write_rows(folder / "a.jsonl", range(1, 41))
    tests = str(Path(__file__).resolve().parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder), tests, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline())


def test_the_process_that_works_ahead_dies_with_a_killed_leader(tmp_path):
    process, pid = start_leader(tmp_path, 60)
    assert is_alive(pid)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(pid), 10)
    assert (tmp_path / "stream" / "key" / "run").is_dir()
    stream = open_numbers(tmp_path, ["a.jsonl"], run="next", buffer_size=10)
    assert [path.name for path in (tmp_path / "stream" / "key").iterdir()] == ["next"]
    stream.close()


def test_a_leader_that_exits_without_closing_leaves_nothing(tmp_path):
    process, pid = start_leader(tmp_path, 0)
    assert process.wait(30) == 3
    assert not is_alive(pid) and not (tmp_path / "stream" / "key").exists()


READER = """
import json, pickle, sys
sys.path.insert(0, sys.argv[1])
store = pickle.loads(open(sys.argv[2], "rb").read())
print(json.dumps([store[index].input_ids.tolist() for index in json.loads(sys.argv[3])]))
"""


def test_a_store_that_is_sent_to_a_new_process_makes_what_is_absent(tmp_path):
    """As spawned loader workers get it."""
    name = write_rows(tmp_path / "a.jsonl", range(1, 13))
    stream = open_numbers(tmp_path, [name], buffer_size=4, packing=True)
    indices = stream.sampler.global_batch_at(0).indices.tolist()
    expected = [stream.store[index].input_ids.tolist() for index in indices]
    (tmp_path / "store.pickle").write_bytes(pickle.dumps(stream.store))
    (stream.folder / "e0-w0.window").unlink()
    arguments = [Path(__file__).resolve().parent.parent, tmp_path / "store.pickle", json.dumps(indices)]
    answer = subprocess.run([sys.executable, "-c", READER, *map(str, arguments)], stdout=-1, check=True)
    assert json.loads(answer.stdout) == expected
    assert (stream.folder / "e0-w0.window").exists()
    with pytest.raises(IndexError, match="epoch 0 has no window 3"):
        stream.store[3 * 2**24]
    stream.close()


def test_loader_workers_do_not_close_their_parents_stream(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 13))
    stream = open_numbers(tmp_path, [name], buffer_size=4, look_ahead=True, training={"max_steps": 5})
    loader = BatchLoader(stream.store, stream.sampler, dp_rank=0, dp_size=1, per_device=2, num_workers=2)
    assert len(list(loader)) == 5
    process = FORK.Process(target=stream.close)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert stream.folder.is_dir() and is_alive(stream.ahead.pid)
    stream.close()
