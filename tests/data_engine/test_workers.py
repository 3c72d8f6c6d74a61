"""The ordered map over processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardyard.data import workers
from shardyard.data.workers import default_workers, ordered_map
from shardyard.errors import UserError


def square_slowly_at_first(number):
    time.sleep(0.05 if number < 2 else 0)
    return number * number


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_the_order_of_the_batches(count):
    assert list(ordered_map(square_slowly_at_first, range(40), workers=count)) == [n * n for n in range(40)]


def test_input_is_read_only_a_bounded_way_ahead():
    read = []

    def numbers():
        for number in range(1000):
            read.append(number)
            yield number

    results = ordered_map(square_slowly_at_first, numbers(), workers=2)
    next(results)
    assert len(read) <= 2 * 2 + 2
    results.close()


def refuse(number):
    raise UserError(f"row {number} is bad")


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_in_a_process_arrives_as_it_is(count):
    with pytest.raises(UserError, match="row 0 is bad"):
        list(ordered_map(refuse, range(4), workers=count))


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named_with_the_key_to_turn():
    with pytest.raises(UserError, match="preprocessing_num_workers"):
        list(ordered_map(die, range(4), workers=2))


def test_the_environment_is_as_before():
    before = dict(os.environ)
    list(ordered_map(square_slowly_at_first, range(4), workers=2))
    assert dict(os.environ) == before


def test_processes_end_when_their_parent_is_killed(tmp_path):
    program = (
        "import os, pathlib, time\n"
        "from shardyard.data.workers import ordered_map\n"
        "def work(i):\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "    time.sleep(0.2)\n"
        "list(ordered_map(work, range(10**6), workers=2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    children = [int(file.name) for file in tmp_path.iterdir()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_default_number_of_processes(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert default_workers(1000, local_ranks=1) == 1
    assert default_workers(10**9, local_ranks=1) == 8
    assert default_workers(10**9, local_ranks=16) == 4
    assert default_workers(10**9, local_ranks=100) == 1
