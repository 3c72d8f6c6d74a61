"""The launcher with stand-in ranks: every way in which a rank can end, and what is left then."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardyard.cli.train import Launch, local_rank_count, take_launch
from shardyard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = """
import sys
from shardyard.cli.train import Launch, start_ranks
port = int(sys.argv[2]) if len(sys.argv) > 2 else None
sys.exit(start_ranks([sys.executable, "-u", sys.argv[1]], 3, Launch(master_port=port)))
"""
NOTE = """
import os, sys, time
rank = int(os.environ["RANK"])
with open(f"rank{rank}.txt", "w") as file:
    print(os.getpid(), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"],
          os.environ["MASTER_PORT"], file=file)
"""
# The others would sleep far beyond the bound; the rank at fault lets them get so far first.
SLEEP_BUT_1 = (
    NOTE
    + """
if rank != 1:
    time.sleep(600)
while not all(os.path.exists(f"rank{other}.txt") for other in range(3)):
    time.sleep(0.05)
"""
)


class Run:
    def __init__(self, folder: Path, script: str, *more: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(script, encoding="utf-8")
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environ |= {"PYTHONPATH": str(ROOT)} | (env or {})
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, "rank.py", *more], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
        )  # fmt: skip

    def wait(self) -> None:
        self.out, self.err = self.process.communicate(timeout=60)

    def notes(self) -> list[list[str]]:
        return [(self.folder / f"rank{rank}.txt").read_text().split() for rank in range(3)]

    def wait_for_ranks(self) -> None:
        while not all((self.folder / f"rank{rank}.txt").exists() for rank in range(3)):
            assert self.process.poll() is None
            time.sleep(0.05)

    def assert_no_rank_is_left(self) -> None:
        deadline = time.monotonic() + 10
        for pid, *_ in self.notes():
            while _runs(int(pid)):
                assert time.monotonic() < deadline, f"{pid} still runs"
                time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ranks_that_succeed_end_with_0_and_share_the_cores(tmp_path: Path) -> None:
    run = Run(tmp_path, NOTE)
    run.wait()
    assert (run.process.returncode, run.err) == (0, "")
    threads = str(max(len(os.sched_getaffinity(0)) // 3, 1))
    assert [note[1:4] for note in run.notes()] == [["3", str(rank), threads] for rank in range(3)]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("os.kill(os.getpid(), 9)", 1, r"rank 1 \(pid {pid}\) was killed by signal 9, SIGKILL"),
        ("sys.exit(3)", 1, r"rank 1 \(pid {pid}\) ended with exit code 3; the other ranks were ended"),
        (
            "from shardyard.cli.rank import guard\ndef work(): raise ValueError('no more')\nguard(work)",
            1,
            r"rank 1 \(pid {pid}\) ended with exit code 1: failed: ValueError: no more; the other",
        ),
        (
            "from shardyard.cli.rank import guard\nfrom shardyard.errors import UserError\n"
            "def work(): raise UserError('data.json:3: no such column')\nguard(work)",
            2,
            r"^error: data.json:3: no such column$",
        ),
    ],
    ids=["killed", "exits", "raises", "user error"],
)
def test_one_bad_rank_ends_all_and_is_named(tmp_path: Path, ending: str, code: int, message: str) -> None:
    run = Run(tmp_path, SLEEP_BUT_1 + ending)
    run.wait()
    assert run.process.returncode == code, run.err
    pid = run.notes()[1][0]
    summary = run.err.strip().splitlines()[-1]
    assert re.search(message.format(pid=pid), summary), run.err
    assert "elastic" not in run.err
    run.assert_no_rank_is_left()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_ranks(tmp_path: Path, stop: signal.Signals) -> None:
    run = Run(tmp_path, NOTE + "time.sleep(600)")
    run.wait_for_ranks()
    run.process.send_signal(stop)
    run.wait()
    assert run.process.returncode == 128 + stop
    assert run.err.strip().splitlines()[-1] == f"stopped by {stop.name}; all ranks have ended"
    run.assert_no_rank_is_left()


def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    body = "\n".join(f"    {line}" for line in (NOTE + "time.sleep(600)").splitlines())
    run = Run(tmp_path, f"from shardyard.cli.rank import guard\ndef work():\n{body}\nguard(work)")
    run.wait_for_ranks()
    run.process.kill()
    run.process.wait(timeout=60)
    run.assert_no_rank_is_left()


def test_a_port_in_use_is_replaced(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        run = Run(tmp_path, NOTE, str(port))
        run.wait()
    assert run.process.returncode == 0
    assert run.err == f"port {port} is in use: the ranks meet at a free one instead\n"
    assert all(note[4] != str(port) for note in run.notes())


def test_a_free_port_is_used_as_asked(tmp_path: Path) -> None:
    port = free_port()
    run = Run(tmp_path, NOTE, str(port))
    run.wait()
    assert (run.process.returncode, run.err) == (0, "")
    assert [note[4] for note in run.notes()] == [str(port)] * 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


NODE = """
import sys
from shardyard.cli.train import Launch, start_ranks
launch = Launch(nnodes=2, node_rank={node}, master_addr="127.0.0.1", master_port={port})
sys.exit(start_ranks([sys.executable, "rank.py"], 2, launch))
"""


def test_two_machines_meet_at_the_address_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(NOTE, encoding="utf-8")
    port = free_port()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE.format(node=node, port=port)], cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    endings = [(node.communicate(timeout=60)[1], node.returncode) for node in nodes]
    assert endings == [("", 0)] * 2
    notes = [(tmp_path / f"rank{rank}.txt").read_text().split()[1:3] for rank in range(4)]
    assert notes == [["4", "0"], ["4", "1"], ["4", "0"], ["4", "1"]]


def test_a_taken_port_of_several_machines_is_the_users_to_change(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        code = NODE.format(node=0, port=busy.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert "UserError: the machines of this run did not meet at 127.0.0.1:" in done.stderr


def test_a_choice_of_threads_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, NOTE, env={"OMP_NUM_THREADS": "7"})
    run.wait()
    assert [note[3] for note in run.notes()] == ["7"] * 3


def test_launch_options_are_taken_in_both_spellings_and_the_rest_stays() -> None:
    words = ["a.yaml", "--data.dataset", "x", "y", "--nproc_per_node", "4", "--nnodes=2", "training.lr=1",
             "--node-rank", "1", "--master-addr", "host", "--master_port=6499"]  # fmt: skip
    launch = take_launch(words)
    assert launch == Launch(4, 2, 1, "host", 6499)
    assert words == ["a.yaml", "--data.dataset", "x", "y", "training.lr=1"]


def test_ranks_follow_the_accelerators_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardyard.device

    monkeypatch.setattr(shardyard.device, "visible_accelerators", lambda: ("npu", 8))
    assert local_rank_count(None) == 8 and local_rank_count(3) == 3
    with pytest.raises(UserError, match=r"--nproc-per-node 9, but this machine has 8 npu"):
        local_rank_count(9)
    monkeypatch.setattr(shardyard.device, "visible_accelerators", lambda: ("cpu", 0))
    assert local_rank_count(None) == 1 and local_rank_count(9) == 9
