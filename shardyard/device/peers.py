"""Who of the other machines is still there: told by beats through the store, judged without it.

A collective of a device does not return when another machine is gone, and a collective of the host says
that *a* peer is gone, not which. So each rank of a run on several machines writes a beat to the store every
few seconds, from a thread, and reads those of all. A machine is given up when none of its ranks has beaten
for ``SHARDYARD_PEER_TIMEOUT`` seconds (one silent rank beside beating ones is the business of the launcher
there); a rank that fails says so in its last beat. The step is not touched.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from shardyard.errors import UserError

_DEFAULT_TIMEOUT_S = 60.0
_BEAT_S, _RANKS_AT_FULL_RATE = 2.0, 128  # beyond, beats are rarer, so that the store has no more to do
_TICK_S = 0.5
_FAREWELL_S = 2.0
_LEFT_GRACE_S = 12.0
"""From a rank's last words to the end of the others, whose own collectives may tell more."""


@dataclass
class _Peer:
    """What is known of a rank; ``seen`` on the watch's clock."""

    text: bytes = b""
    seen: float = 0.0
    state: str = "here"
    node: int = 0
    host: str = ""
    cause: str = ""


class PeerWatch:
    """The beats of this rank and the judgement on those of the others; two daemon threads.

    ``alone``: no launcher looks after the ranks of a machine, so each rank is judged by itself.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, node: int, alone: bool, timeout_s: float
    ) -> None:
        self._store = store
        self._rank, self._node, self._alone = rank, node, alone
        self._keys = [f"peers/{other}" for other in range(world_size)]
        self._timeout_s = timeout_s
        self._interval_s = _BEAT_S * max(world_size / _RANKS_AT_FULL_RATE, 1.0)
        self._peers = [_Peer() for _ in self._keys]
        self._units: list[tuple[int, ...]] = []
        """Ranks that are judged together: those of a machine, or each alone. The first keeps the store."""
        self._clock = 0.0
        self._store_seen, self._store_lost = 0.0, False
        self._state, self._cause, self._count = "here", "", 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def announce(self) -> None:
        """The first beat: before the ranks meet, so that afterwards every rank's is there."""
        self._beat(self._store)

    def start(self) -> None:
        """Beat and judge from now on; all ranks have announced themselves."""
        connection = _clone(self._store)  # an operation that waits must not hold up the beats
        threading.Thread(target=self._keep_beating, args=(connection,), name="beats", daemon=True).start()
        threading.Thread(target=self._keep_judging, name="peer-watch", daemon=True).start()

    def finish(self, state: str, cause: str = "") -> None:
        """The last beat: ``done``, or ``left`` for a fault; never blocks for long."""
        self._over.set()
        self._state, self._cause = state, cause
        last = threading.Thread(target=self._last_beat, name="last-beat", daemon=True)
        last.start()
        last.join(_FAREWELL_S)

    def everyone_is_done(self) -> bool:
        states = [json.loads(value)[0] for value in self._store.multi_get(self._keys)]
        return all(state != "here" for state in states)

    def explain(self, seconds: float) -> str:
        """Who is gone, now that something has failed; "" if nobody is known to be after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if told := self._failed(0.0):
                return told
            time.sleep(_TICK_S / 2)
        return self._silent(
            max(3 * self._interval_s, 0.6 * seconds), store_s=0.0 if self._store_lost else None
        )

    def _beat(self, store: dist.Store) -> None:
        with self._lock:
            self._count += 1
            beat = [self._state, self._count, self._node, socket.gethostname(), self._cause]
            store.set(self._keys[self._rank], json.dumps(beat))

    def _last_beat(self) -> None:
        try:
            self._beat(_clone(self._store))
        except (dist.DistError, RuntimeError):
            return  # the store is gone, and with it whoever would have read this

    def _keep_beating(self, store: dist.Store) -> None:
        try:
            while not self._over.is_set():
                self._beat(store)
                self._note(store.multi_get(self._keys))
                self._over.wait(self._interval_s)
        except (dist.DistError, RuntimeError):
            self._store_lost = True  # its silence is judged like a peer's

    def _note(self, beats: list[bytes]) -> None:
        self._store_seen = self._clock
        for peer, text in zip(self._peers, beats, strict=True):
            if text != peer.text:
                peer.state, _, peer.node, peer.host, peer.cause = json.loads(text)
                peer.text, peer.seen = text, self._clock
        units: dict[int, tuple[int, ...]] = {}
        for rank, peer in enumerate(self._peers):
            place = rank if self._alone else peer.node
            units[place] = (*units.get(place, ()), rank)
        self._units = list(units.values())

    def _keep_judging(self) -> None:
        """The clock counts only time in which this process ran: one that was stopped blames nobody."""
        before = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            self._clock += min(now - before, 4 * _TICK_S)
            before = now
            verdict = self._failed(_LEFT_GRACE_S) or self._silent(self._timeout_s, store_s=self._timeout_s)
            if verdict and not self._over.is_set():
                _when_lost(verdict)
                return

    def _failed(self, grace_s: float) -> str:
        for rank, peer in enumerate(self._peers):
            if peer.state == "left" and peer.cause and self._clock - peer.seen >= grace_s:
                return f"rank {rank} on node {peer.node} ({peer.host}) has ended: {peer.cause}"
        return ""

    def _silent(self, seconds: float, *, store_s: float | None) -> str:
        """Who has been silent for ``seconds``; the store's keeper, if the store has for ``store_s``."""
        store_silence = self._clock - self._store_seen
        others = [unit for unit in self._units if self._rank not in unit]
        if store_s is not None and store_silence >= store_s and others and others[0] == self._units[0]:
            return f"{self._name(others[0])}, which keeps the store of this run, no longer answers"
        if store_silence >= seconds:
            return ""  # nobody can be judged by beats that cannot be read
        lost = [unit for unit in others if self._silence(unit) >= seconds]
        if not lost:
            return ""
        longest = max(self._silence(unit) for unit in lost)
        return f"no sign of life for {longest:.0f} s from {' and '.join(map(self._name, lost))}"

    def _silence(self, unit: tuple[int, ...]) -> float:
        """Seconds since the last beat of those that should beat; 0 if nobody should."""
        beating = [self._clock - self._peers[rank].seen for rank in unit if self._peers[rank].state == "here"]
        return min(beating, default=0.0)

    def _name(self, unit: tuple[int, ...]) -> str:
        first = self._peers[unit[0]]
        ranks = f"rank {unit[0]}" if len(unit) == 1 else f"ranks {', '.join(map(str, unit))}"
        return f"node {first.node} ({first.host}) with {ranks}"


def _clone(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs


def make_watch(store: dist.Store, rank: int, world_size: int) -> PeerWatch | None:
    """The watch of this rank; None where there is nobody whom the launcher of this machine does not see.

    Raises:
        UserError: SHARDYARD_PEER_TIMEOUT is no number of seconds.
    """
    text = os.environ.get("SHARDYARD_PEER_TIMEOUT", "")
    try:
        timeout_s = float(text or _DEFAULT_TIMEOUT_S)
    except ValueError:
        raise UserError(f"SHARDYARD_PEER_TIMEOUT={text}: seconds are wanted, 0 for no watch") from None
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    is_task = not has_launcher and "SLURM_PROCID" in os.environ
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 or is_task
    if world_size == 1 or not several or timeout_s <= 0:
        return None
    if timeout_s < 5 * _BEAT_S:
        raise UserError(
            f"SHARDYARD_PEER_TIMEOUT={text}: at least {5 * _BEAT_S:.0f} seconds, or 0 for no watch"
        )
    global _current
    _current = PeerWatch(
        store, rank, world_size, node=int(os.environ.get("GROUP_RANK", "0")), alone=not has_launcher,
        timeout_s=timeout_s,
    )  # fmt: skip
    return _current


def end_process(verdict: str) -> None:
    """End this process, whatever its other threads wait for."""
    print(f"rank {os.environ.get('RANK', '0')}: {verdict}", file=sys.stderr, flush=True)
    os._exit(1)


def when_lost(act: Callable[[str], object]) -> None:
    """Call ``act`` with the verdict, in a thread, instead of `end_process`; it must end the process."""
    global _when_lost
    _when_lost = act


def current() -> PeerWatch | None:
    """The watch of this process, if it has one."""
    return _current


_current: PeerWatch | None = None
_when_lost: Callable[[str], object] = end_process
