"""Trainers in processes of their own that take turns, step by step; both ends of the pipe.

Whatever else the machine does hits all of them alike, and those that wait for their turn sleep in a read. A
contestant speaks JSON, one object a line: `Turns.ready` once, `Turns.report` after each step, and it begins a
step when it reads a line. What its libraries print goes to standard error. Only Python's own library is
imported here: a peer's environment holds no Shardyard, and this file is read there too.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

MIB = 2**20
HERE = Path(__file__).resolve().parent
SHOWN_VERSIONS = ("torch", "transformers", "accelerate", "trl", "datasets")


@dataclass(frozen=True)
class Step:
    """One update. ``cpu_seconds`` are of the reporting process; ``peak_bytes`` is its most resident memory so
    far; ``live_bytes`` the most bytes of living tensors within the step, where that was watched (such a step
    is not timed).
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    loss: float
    peak_bytes: int
    live_bytes: int | None = None


@dataclass(frozen=True)
class Entry:
    """Who takes part: a command, of which ``ranks`` processes are started; rank 0 speaks."""

    name: str
    command: Sequence[str]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a contestant did. Figures leave out the ``warm_up`` first steps and the watched ones."""

    name: str
    facts: Mapping[str, Any]
    steps: tuple[Step, ...]
    warm_up: int

    @property
    def timed(self) -> list[Step]:
        return [step for step in self.steps[self.warm_up :] if step.live_bytes is None]

    @property
    def tokens_per_second(self) -> float:
        """The median step's."""
        return median(step.tokens / step.seconds for step in self.timed)

    @property
    def tokens_per_second_over_all(self) -> float:
        """All tokens over all seconds."""
        return sum(step.tokens for step in self.timed) / sum(step.seconds for step in self.timed)

    @property
    def tokens_per_cpu_second(self) -> float:
        """The median step's, by the processor's seconds: steadier where other work shares the cores."""
        return median(step.tokens / max(step.cpu_seconds, 1e-9) for step in self.timed)

    @property
    def peak_bytes(self) -> int:
        """The most resident memory of the process that speaks, loading included, watched steps not."""
        return max(step.peak_bytes for step in self.steps if step.live_bytes is None)

    @property
    def live_bytes(self) -> int | None:
        watched = [step.live_bytes for step in self.steps if step.live_bytes is not None]
        return max(watched) if watched else None


def largest_loss_difference(ours: Result, theirs: Result) -> float:
    """Over all steps that both did."""
    return max(abs(a.loss - b.loss) for a, b in zip(ours.steps, theirs.steps, strict=False))


class Refused(SystemExit):
    """A contestant cannot do what its entry asks for; the message says why."""


def compete(entries: Sequence[Entry], *, steps: int, warm_up: int) -> list[Result]:
    """Let the entries take turns for ``steps`` updates each, the first ``warm_up`` among them.

    All load one after another before the first step. Who begins changes from step to step, so that nobody
    always runs on another's warm caches.

    Raises:
        Refused: a contestant says that it cannot do this.
        SystemExit: one of them has ended.
    """
    contestants: list[_Contestant] = []
    try:
        for entry in entries:
            contestants.append(_Contestant(entry))
            contestants[-1].facts = contestants[-1].receive("ready")
        for number in range(steps):
            first = number % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                contestant.take_turn()
        for contestant in contestants:
            contestant.finish()
    finally:
        for contestant in contestants:
            contestant.kill()
    return [Result(c.entry.name, c.facts, tuple(c.steps), warm_up) for c in contestants]


class _Contestant:
    """A trainer's processes and what it has reported."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.steps = entry, []
        self.facts: Mapping[str, Any] = {}
        self._processes: list[subprocess.Popen[str]] = []
        port = _free_port() if entry.ranks > 1 else 0
        for rank in range(entry.ranks):
            speaks = rank == 0
            self._processes.append(
                subprocess.Popen(
                    list(entry.command), text=True,
                    env={**os.environ, **entry.environment, **_seat(rank, entry, port)},
                    stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if speaks else 2,  # standard error
                )
            )  # fmt: skip

    def receive(self, what: str) -> Any:
        stdout = self._processes[0].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            code = self._processes[0].wait()
            sys.exit(f"{self.entry.name} ended with exit code {code}; its message stands above")
        said = json.loads(line)
        if "refused" in said:
            raise Refused(said["refused"])
        return said[what]

    def take_turn(self) -> None:
        self._go()
        self.steps.append(Step(**self.receive("step")))

    def finish(self) -> None:
        self._go()
        for process in self._processes:
            if code := process.wait():
                sys.exit(f"{self.entry.name} ended with exit code {code}; its message stands above")

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _go(self) -> None:
        stdin = self._processes[0].stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()


def _seat(rank: int, entry: Entry, port: int) -> dict[str, str]:
    """The variables that torchrun would set."""
    if entry.ranks == 1:
        return {}
    ranks = str(entry.ranks)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Turns:
    """A trainer's end of the pipe. The clock runs from reading a "go" to the report of the step."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for everything else that prints
        self._started = 0.0, 0.0

    def ready(self) -> None:
        """Say that the next thing is the first step, and wait for the turn."""
        self._say("ready", installed_versions())
        self._wait()

    def report(self, tokens: int, loss: float, live_bytes: int | None = None) -> None:
        """Tell of a finished step and wait for the turn."""
        seconds, cpu_seconds = (now - then for now, then in zip(_clocks(), self._started, strict=True))
        self._say(
            "step",
            {
                "seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "loss": loss,
                "peak_bytes": peak_resident_bytes(), "live_bytes": live_bytes,
            },
        )  # fmt: skip
        self._wait()

    def refuse(self, reason: str) -> None:
        """Say, instead of being ready, that this cannot be done."""
        self._say("refused", reason)

    def _say(self, what: str, value: Any) -> None:
        self._out.write(json.dumps({what: value}) + "\n")
        self._out.flush()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit("the benchmark has ended")
        self._started = _clocks()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def peak_resident_bytes() -> int:
    """The most resident memory of this program so far (getrusage would count its parent's, before exec)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in SHOWN_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """The processor and its cores, for the head of a table."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], out: Callable[[str], None] = print
) -> None:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    for cells in lines:
        out("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
