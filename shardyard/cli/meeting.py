"""How the launchers of several machines agree on each start of the ranks.

Node 0 keeps a store at one address and port for as long as its launcher lives. For each start of the ranks
it writes a number; every machine takes its seat there once and waits until all seats are taken. So a machine
that failed, or was started again, never joins the start that it has left, and one port is enough for all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shardyard.cli.launch import DEFAULT_PORT, Launch
from shardyard.errors import UserError

_POLL_S, _TELL_S = 0.2, 30.0
_DEFAULT_WAIT_S = 600.0
_LINGER_S = 2.0
_STORE_TIMEOUT = timedelta(seconds=60)


class MeetingFailed(Exception):
    """The machines did not come together; the text says which, and what to do."""


@dataclass(frozen=True)
class Start:
    """One start of the ranks: its number (0 is the first), this machine's number in it, the launch's time."""

    number: int
    node_rank: int
    launched: float


class Alone:
    """One machine: every start is its own."""

    def __init__(self) -> None:
        self._number, self._launched = -1, time.time()

    def next_start(self) -> Start:
        self._number += 1
        return Start(self._number, 0, self._launched)

    def give_up(self, cause: str) -> None:
        """Nobody else waits."""


def open_meeting(launch: Launch, ranks: int) -> Meeting | Alone:
    """Where this machine, which starts ``ranks``, learns of each start.

    Raises:
        UserError: it should keep the meeting and cannot, because the port is taken.
    """
    if launch.nnodes == 1:
        return Alone()
    try:
        return Meeting(launch, ranks)
    except dist.DistError as error:
        raise UserError(
            f"the machines of this run did not meet at {launch.endpoint} (--master-addr, --master-port): "
            f"{error}. Is the port free, and this command started on all {launch.nnodes}?"
        ) from error


class Meeting:
    """This machine's way to the others; ``ranks`` is how many it starts."""

    def __init__(self, launch: Launch, ranks: int) -> None:
        self._launch, self._ranks = launch, ranks
        self._host, self._port = launch.master_addr or "127.0.0.1", launch.master_port or DEFAULT_PORT
        self._wait_s = _wait_seconds()
        self._launched, self._number = time.time(), -1
        self._store: dist.Store | None = None
        if launch.node_rank == 0:
            self._store = self._connect(hosts=True)
        self._hosts = launch.node_rank == 0 or (launch.node_rank is None and self._can_host())

    def next_start(self) -> Start:
        """Wait until every machine is ready for the next start of the ranks.

        Raises:
            MeetingFailed: they did not come within ``SHARDYARD_MEET_TIMEOUT`` seconds, or one gave up.
            UserError: two machines contradict each other.
        """
        deadline = _Patience(self._wait_s)
        if self._hosts:
            start = self._call()
        else:
            while (start := self._take_seat(deadline)) is None:
                deadline.wait(f"a seat at {self._host}:{self._port}")
        try:
            self._wait_for_all(start, deadline)
        except dist.DistError:
            raise MeetingFailed(f"node 0, which keeps the meeting at {self._place}, has ended") from None
        return start

    def give_up(self, cause: str) -> None:
        """Tell the others that this machine does not come back, for a mistake that a restart cannot mend."""
        try:
            if self._store is not None:
                self._store.set("gave up", cause)
        except dist.DistError:
            return  # node 0 has ended: nobody waits

    @property
    def _place(self) -> str:
        return f"{self._host}:{self._port}"

    def _call(self) -> Start:
        """Node 0 opens the next start."""
        assert self._store is not None
        self._number += 1
        start = Start(self._number, 0, self._launched)
        told = {"number": start.number, "launched": start.launched, "nnodes": self._launch.nnodes}
        self._sit(self._store, start)
        self._store.set("start", json.dumps(told | {"last": start.number >= self._launch.max_restarts}))
        return start

    def _take_seat(self, deadline: _Patience) -> Start | None:
        """This machine's seat in the newest start; None if that has one already, or is not there yet."""
        try:
            if self._store is None:
                while not _answers(self._host, self._port):
                    deadline.wait(f"node 0 at {self._place}")
                self._store = self._connect(hosts=False)
            if not self._store.check(["start"]):
                return None
            told = json.loads(self._store.get("start"))
            self._check(told)
            number = told["number"]
            node = self._launch.node_rank
            seat = node if node is not None else self._store.add(f"seats/{number}", 1)
            taken = self._store.add(f"seat/{number}/{seat}", 1) > 1 or seat >= told["nnodes"]
        except dist.DistError:
            self._store = None  # node 0's launcher has ended; it may be started again
            return None
        if taken and told["last"] and self._number < 0:
            raise UserError(
                f"the seat of node {seat} in the run at {self._place} is taken, and no restart will come: is "
                f"--node-rank or the port used twice, or --nnodes {told['nnodes']} too small?"
            )
        if taken:
            return None
        self._number = number
        start = Start(number, seat, told["launched"])
        self._sit(self._store, start)
        return start

    def _check(self, told: dict) -> None:
        if told["nnodes"] != self._launch.nnodes:
            raise UserError(
                f"--nnodes {self._launch.nnodes}, but node 0 at {self._place} was started with --nnodes "
                f"{told['nnodes']}: give all machines the same"
            )

    def _sit(self, store: dist.Store, start: Start) -> None:
        store.set(f"ranks/{start.number}/{start.node_rank}", f"{self._ranks} {socket.gethostname()}")

    def _wait_for_all(self, start: Start, deadline: _Patience) -> None:
        store, nodes = self._store, range(self._launch.nnodes)
        assert store is not None
        while missing := [node for node in nodes if not store.check([f"ranks/{start.number}/{node}"])]:
            if store.check(["gave up"]):
                raise MeetingFailed(f"another machine has given up: {store.get('gave up').decode()}")
            deadline.wait(f"node {', '.join(map(str, missing))} of {len(nodes)} to come to {self._place}")
        found = [store.get(f"ranks/{start.number}/{node}").decode().split() for node in nodes]
        odd = [node for node in nodes if found[node][0] != found[0][0]]
        if odd:
            time.sleep(_LINGER_S if self._hosts else 0.0)  # the others read here what is wrong
            raise UserError(
                f"node {odd[0]} ({found[odd[0]][1]}) starts {found[odd[0]][0]} ranks, node 0 ({found[0][1]}) "
                f"{found[0][0]}: give all machines the same --nproc-per-node"
            )

    def _connect(self, *, hosts: bool) -> dist.Store:
        # multi_tenant: the ranks of each start meet at this very store, through torch's static rendezvous.
        store = dist.TCPStore(
            self._host, self._port, None, hosts, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
        return dist.PrefixStore(f"{self._launch.name}/meeting", store)

    def _can_host(self) -> bool:
        """Whether the endpoint is an address of this machine, and its port is still free."""
        try:
            address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise UserError(f"--rdzv-endpoint {self._host}: {error}") from error
        with socket.socket(address[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address[4])
            except OSError:
                return False
        try:
            self._store = self._connect(hosts=True)
        except dist.DistError:  # another launcher of this machine was faster
            return False
        return True


class _Patience:
    """Waits in small steps, says for what every half minute, and ends after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._told = seconds, time.monotonic(), 0.0

    def wait(self, what: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._seconds:
            raise MeetingFailed(
                f"waited {waited:.0f} s in vain for {what}: is this command started on all machines, with "
                "the same address, port and --nnodes, and is the port open? (SHARDYARD_MEET_TIMEOUT sets "
                "the wait)"
            )
        if waited - self._told > _TELL_S:
            self._told = waited
            print(f"waiting for {what} ({waited:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there; torch's own client would fill the log with its attempts."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _wait_seconds() -> float:
    text = os.environ.get("SHARDYARD_MEET_TIMEOUT", "")
    try:
        return float(text or _DEFAULT_WAIT_S)
    except ValueError:
        raise UserError(f"SHARDYARD_MEET_TIMEOUT={text}: a number of seconds is wanted") from None
