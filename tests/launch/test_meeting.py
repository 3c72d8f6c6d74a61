"""How launchers agree on a start: who takes part, who waits, what contradicts. Machines are threads here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest
from support.nodes import free_port

from shardyard.cli.launch import Launch
from shardyard.cli.meeting import Meeting, MeetingFailed, Start
from shardyard.errors import UserError

WAIT_S = 30


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def port() -> int:
    return free_port()


def machine(
    port: int, node_rank: int | None, *, nnodes: int = 2, ranks: int = 4, restarts: int = 3
) -> Meeting:
    launch = Launch(
        nnodes=nnodes, node_rank=node_rank, master_addr="127.0.0.1", master_port=port, max_restarts=restarts
    )
    return Meeting(launch, ranks)


def together(threads: Executor, *machines: Meeting) -> list[Start]:
    return [begun.result(WAIT_S) for begun in [threads.submit(one.next_start) for one in machines]]


def test_all_machines_learn_the_same_start_and_keep_their_numbers(threads: Executor, port: int) -> None:
    machines = [machine(port, node, nnodes=3) for node in (2, 0, 1)]
    for number in range(3):
        starts = together(threads, *machines)
        assert [(start.number, start.node_rank) for start in starts] == [(number, node) for node in (2, 0, 1)]
        assert len({start.launched for start in starts}) == 1


def test_machines_without_numbers_are_numbered_as_they_come(threads: Executor, port: int) -> None:
    machines = [machine(port, None, nnodes=3) for _ in range(3)]
    for number in range(2):
        starts = together(threads, *machines)
        assert sorted(start.node_rank for start in starts) == [0, 1, 2]
        assert {start.number for start in starts} == {number}
        assert starts[0].node_rank == 0  # the first keeps the meeting


def test_a_machine_never_joins_the_start_that_it_has_left(threads: Executor, port: int) -> None:
    first, second = machine(port, 0), machine(port, 1)
    together(threads, first, second)
    early = threads.submit(second.next_start)  # its ranks have failed, those of machine 0 still run
    time.sleep(1.0)
    assert not early.done()
    assert [first.next_start().number, early.result(WAIT_S).number] == [1, 1]


def test_a_machine_that_was_started_anew_joins_the_next_start(threads: Executor, port: int) -> None:
    first = machine(port, 0)
    together(threads, first, machine(port, 1))
    anew = machine(port, 1)
    begun: Future[Start] = threads.submit(anew.next_start)
    time.sleep(1.0)
    assert not begun.done()
    assert together(threads, first)[0].number == begun.result(WAIT_S).number == 1


def test_a_number_used_twice_is_told_when_nothing_could_mend_it(threads: Executor, port: int) -> None:
    both = machine(port, 0, restarts=0), machine(port, 1, restarts=0)
    together(threads, *both)
    with pytest.raises(UserError, match=r"seat of node 1 .* is taken.*--node-rank or the port used twice"):
        machine(port, 1, restarts=0).next_start()


def test_other_counts_of_ranks_are_told_to_all(threads: Executor, port: int) -> None:
    begun = [threads.submit(machine(port, node, ranks=ranks).next_start) for node, ranks in ((0, 8), (1, 4))]
    for one in begun:
        with pytest.raises(UserError, match=r"node 1 \(.*\) starts 4 ranks, node 0 \(.*\) 8: .*--nproc-per"):
            one.result(WAIT_S)


def test_another_count_of_machines_is_told(
    threads: Executor, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_MEET_TIMEOUT", "3")
    first = threads.submit(machine(port, 0, nnodes=3).next_start)
    with pytest.raises(UserError, match=r"--nnodes 2, but node 0 .* with --nnodes 3"):
        machine(port, 1).next_start()
    with pytest.raises(MeetingFailed, match="in vain for node 1, 2 of 3"):
        first.result(WAIT_S)


def test_one_that_waits_in_vain_says_for_whom(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_MEET_TIMEOUT", "0.5")
    with pytest.raises(MeetingFailed, match=r"in vain for node 1 of 2 to come to 127.0.0.1"):
        machine(port, 0).next_start()
    with pytest.raises(MeetingFailed, match=r"in vain for node 0 at 127.0.0.1"):
        machine(free_port(), 1).next_start()


def test_a_machine_that_gave_up_is_not_waited_for(threads: Executor, port: int) -> None:
    first, second = machine(port, 0), machine(port, 1)
    together(threads, first, second)
    second.give_up("data.dataset: no such file")
    with pytest.raises(MeetingFailed, match=r"another machine has given up: data.dataset: no such file"):
        first.next_start()
