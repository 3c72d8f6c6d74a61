"""The watch over other machines: whom it blames, and whom not. Time is shortened; ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from shardyard.device import peers
from shardyard.device.peers import PeerWatch
from shardyard.errors import UserError

TIMEOUT_S = 1.5


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the watches of this test conclude; beats come 40 times as often."""
    told: list[str] = []
    monkeypatch.setattr(peers, "_BEAT_S", 0.05)
    monkeypatch.setattr(peers, "_TICK_S", 0.05)
    monkeypatch.setattr(peers, "_LEFT_GRACE_S", 0.3)
    monkeypatch.setattr(peers, "_when_lost", told.append)
    return told


Start = Callable[..., list[PeerWatch]]


@pytest.fixture
def start(verdicts: list[str]) -> Iterator[Start]:
    """``start(nodes)``: a beating watch for each rank, on the node given; only rank 0 judges."""
    begun: list[PeerWatch] = []

    def start_all(nodes: list[int], alone: bool = False, timeout_s: float = TIMEOUT_S) -> list[PeerWatch]:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank, node in enumerate(nodes):
            limit = timeout_s if rank == 0 else 3600.0
            begun.append(PeerWatch(store, rank, len(nodes), node=node, alone=alone, timeout_s=limit))
            begun[-1].announce()
        for watch in begun:
            watch.start()
        return begun

    yield start_all
    for watch in begun:
        watch._over.set()


def die(watch: PeerWatch) -> None:
    """No beat any more, and no last words."""
    watch._over.set()


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_machine_whose_ranks_are_all_silent_is_named_with_them(start: Start, verdicts: list[str]) -> None:
    watches = start([0, 0, 1, 1, 2])
    die(watches[2])
    die(watches[3])
    wait_for(lambda: verdicts)
    assert verdicts[0].startswith("no sign of life for 2 s from node 1 (")
    assert verdicts[0].endswith(") with ranks 2, 3")


def test_one_silent_rank_beside_beating_ones_is_its_launchers_business(
    start: Start, verdicts: list[str]
) -> None:
    watches = start([0, 1, 1])
    die(watches[1])
    time.sleep(3 * TIMEOUT_S)
    assert verdicts == []


def test_without_launchers_each_rank_is_judged(start: Start, verdicts: list[str]) -> None:
    watches = start([0, 1, 1], alone=True)
    die(watches[2])
    wait_for(lambda: verdicts)
    assert verdicts[0].endswith(") with rank 2")


def test_ranks_that_are_done_are_missed_by_nobody(start: Start, verdicts: list[str]) -> None:
    watches = start([0, 1, 1])
    assert not watches[0].everyone_is_done()
    watches[1].finish("done")
    watches[2].finish("done")
    time.sleep(2 * TIMEOUT_S)
    assert verdicts == []
    watches[0].finish("done")
    assert watches[0].everyone_is_done()


def test_last_words_are_passed_on_but_those_of_a_rank_that_lost_another_are_not(
    start: Start, verdicts: list[str]
) -> None:
    watches = start([0, 1, 2], timeout_s=3600.0)
    watches[1].finish("left", "")
    time.sleep(1.0)
    assert verdicts == []
    watches[2].finish("left", "failed in step 3: ValueError: shapes differ")
    wait_for(lambda: verdicts)
    assert verdicts[0].startswith("rank 2 on node 2 (")
    assert verdicts[0].endswith(") has ended: failed in step 3: ValueError: shapes differ")


def test_a_rank_busy_in_python_still_beats(start: Start, verdicts: list[str]) -> None:
    start([0, 1])
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    busy = [threading.Thread(target=count) for _ in range(3)]
    for thread in busy:
        thread.start()
    time.sleep(2 * TIMEOUT_S)
    stop.set()
    assert verdicts == []


def test_a_process_that_was_stopped_itself_blames_nobody(
    start: Start, verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP: an hour passes between two ticks of the watch, and nobody's beats were read in it."""
    watches = start([0, 1])
    wait_for(lambda: watches[0]._clock > 0.2)
    real, jump = time.monotonic, 3600.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: real() + jump)
    time.sleep(TIMEOUT_S / 2)
    assert verdicts == [] and watches[0]._clock < 10


def test_an_explanation_names_the_machine_after_the_time_it_is_given(
    start: Start, verdicts: list[str]
) -> None:
    watches = start([0, 0, 1], timeout_s=3600.0)
    assert watches[1].explain(0.5) == ""
    die(watches[2])
    told = watches[1].explain(2.0)
    assert told.endswith(") with rank 2") and "node 1 (" in told


@pytest.mark.parametrize(("value", "message"), [("soon", "seconds are wanted"), ("2", "at least 10 seconds")])
def test_a_limit_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("SHARDYARD_PEER_TIMEOUT", value)
    with pytest.raises(UserError, match=message):
        peers.make_watch(dist.HashStore(), 0, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "a",
            "SLURM_PROCID": "0",
        },  # a launcher sees all ranks
        {"GROUP_WORLD_SIZE": "2", "SHARDYARD_PEER_TIMEOUT": "0"},
        {},
    ],
)
def test_where_nobody_is_out_of_sight_there_is_no_watch(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SHARDYARD_PEER_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert peers.make_watch(dist.HashStore(), 0, 2) is None
