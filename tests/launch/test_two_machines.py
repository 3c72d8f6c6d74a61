"""Runs on two machines: they meet, train like one, and go on after one of them has died.

Ranks here only talk to each other, which is quick; test_two_machines_train.py has whole training runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes import PYTHON, Machine, Process, free_port, two_namespaces, wait_for

LAUNCH = """
import sys
from shardyard.cli.launch import take_launch
from shardyard.cli.train import start_ranks
words = sys.argv[2:]
launch = take_launch(words)
from shardyard.errors import UserError
try:
    code = start_ranks([sys.executable, "-u", sys.argv[1]], launch.nproc_per_node or 1, launch)
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    code = 2
sys.exit(code)
"""
# In its first start the ranks add up numbers for ever; in the second they write what they are and end.
TALK = """
import json, os, time
from pathlib import Path
from shardyard.cli.rank import guard

def work():
    from shardyard.cli.rank import _leave_for_lost_peer
    from shardyard.device import Device, peers, restarted_since, start_process_group
    peers.when_lost(_leave_for_lost_peer)  # as every rank of a run does
    group = start_process_group(Device("cpu"))
    rank, start = group.rank, int(os.environ["SHARDYARD_START"])
    total = group.gather([float(rank)]).sum().item()
    facts = [group.node_rank, group.local_rank, group.num_nodes, total, restarted_since() is not None]
    Path(f"rank{rank}.start{start}").write_text(json.dumps(facts))
    while start < int(os.environ["LAST"]):
        group.gather([1.0])
        time.sleep(0.1)
        if os.environ["IDLE"] == "yes":
            time.sleep(600)
    group.stop()
    return 0

raise SystemExit(guard(work))
"""


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[Machine]]:
    with two_namespaces() as machines:
        yield machines


class Run:
    """Two launchers in ``folder``, each with two ranks that run TALK."""

    def __init__(
        self,
        folder: Path,
        machines: list[Machine],
        how: str,
        *options: str,
        last: int = 0,
        idle: bool = False,
    ) -> None:
        self.folder, self.machines, self.options = folder, machines, options
        self.port, self.how = free_port(), how
        self.env = {"LAST": str(last), "IDLE": "yes" if idle else "no", "SHARDYARD_PEER_TIMEOUT": "10"}
        (folder / "talk.py").write_text(TALK, encoding="utf-8")
        self.nodes = [self.start(node) for node in range(2)]

    def start(self, node: int) -> Process:
        address = self.machines[0].address
        where = {
            "static": (f"--node-rank={node}", f"--master-addr={address}", f"--master-port={self.port}"),
            "rdzv": ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{self.port}", "--rdzv-id=a/b"),
        }[self.how]
        command = [
            *PYTHON,
            "-c",
            LAUNCH,
            "talk.py",
            "--nproc-per-node=2",
            "--nnodes=2",
            *where,
            *self.options,
        ]
        return Process(self.machines[node], command, self.folder, f"node{node}", **self.env)

    def has_started(self, number: int) -> bool:
        return all((self.folder / f"rank{rank}.start{number}").exists() for rank in range(4))

    def facts(self, number: int) -> list[str]:
        return [(self.folder / f"rank{rank}.start{number}").read_text() for rank in range(4)]


def expected(*, restarted: str) -> list[str]:
    """[node, local rank, nodes, 0 + 1 + 2 + 3, restarted] of ranks 0 to 3: two on each node, in order."""
    return [f"[{rank // 2}, {rank % 2}, 2, 6.0, {restarted}]" for rank in range(4)]


def test_a_dead_machine_is_named_and_with_a_restart_the_run_goes_on(
    tmp_path: Path, namespaces: list[Machine]
) -> None:
    """In two network namespaces: machine 1 loses power, machine 0 says so, machine 1 comes back."""
    run = Run(tmp_path, namespaces, "static", "--max-restarts=1", last=1)
    wait_for(lambda: run.has_started(0), *run.nodes)
    assert run.facts(0) == expected(restarted="false")
    run.nodes[1].kill()
    wait_for(lambda: "restart 1 of 1" in run.nodes[0].text(), run.nodes[0])
    log = run.nodes[0].text()
    assert re.search(
        r"lost contact with another rank: no sign of life for \d+ s from node 1 \(.+\) with", log
    ), log
    assert "with ranks 2, 3" in log and "Traceback" not in log
    again = run.start(1)
    assert [run.nodes[0].wait(), again.wait()] == [0, 0], run.nodes[0].text() + again.text()
    assert run.facts(1) == expected(restarted="true")


@pytest.mark.soak
@pytest.mark.parametrize("how", ["static", "rdzv"])
@pytest.mark.parametrize("idle", [False, True], ids=["in a collective", "outside of one"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_machine_ends_and_says_who_went_away(
    tmp_path: Path, namespaces: list[Machine], how: str, idle: bool, victim: int
) -> None:
    """Also where no collective fails, as on devices, whose collectives wait for ever."""
    run = Run(tmp_path, namespaces, how, last=1, idle=idle)
    wait_for(lambda: run.has_started(0), *run.nodes)
    began = time.monotonic()
    run.nodes[victim].kill()
    other = run.nodes[1 - victim]
    assert other.wait(seconds=90) == 1
    assert time.monotonic() - began < 60
    log = other.text()
    ranks = ("0, 1", "2, 3")[victim]
    assert re.search(rf"lost contact .*node {victim} \(.*\) with ranks {ranks}", log) or re.search(
        rf"^rank \d: .*node {victim} \(.*\) with ranks {ranks}", log, re.M
    ), log
    assert "Traceback" not in log


@pytest.mark.soak
def test_machines_on_the_loopback_meet_by_rendezvous(tmp_path: Path) -> None:
    run = Run(tmp_path, [Machine(), Machine()], "rdzv")
    assert [node.wait() for node in run.nodes] == [0, 0]
    assert run.facts(0) == expected(restarted="false")
