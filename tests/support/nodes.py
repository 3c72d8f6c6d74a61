"""Machines for tests of runs on several: launchers on the loopback, or in network namespaces of their own.

A namespace has its own interfaces and ports, so nothing works there by accident of being one machine. Two are
made by ``unshare`` and joined by a pair of virtual Ethernet devices; as an ordinary user inside a user
namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 900.0


@dataclass(frozen=True)
class Machine:
    """``enter`` goes before a command that is to run there; the machines reach it at ``address``."""

    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Process:
    """A command on a machine, its output in a file so that no pipe fills up."""

    def __init__(self, machine: Machine, command: Sequence[str], folder: Path, name: str, **env: str) -> None:
        self.log_path = folder / f"{name}.log"
        environ = {
            key: value for key, value in os.environ.items()
            if not re.match("RANK$|WORLD_SIZE$|SLURM_|SHARDYARD_|TORCHELASTIC_", key)
        }  # fmt: skip
        environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
        with self.log_path.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*machine.enter, *command], cwd=folder, stdout=log, stderr=log, env=environ
            )

    def text(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def wait(self, seconds: float = LONG_S) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended after {seconds:.0f} s:\n{self.text()}") from None

    def kill(self) -> list[int]:
        """SIGKILL to the command and everything that it started, as when a machine loses power."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return pids


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def wait_for(condition: Any, *processes: Process, seconds: float = LONG_S) -> None:
    """Until ``condition()`` holds; fails with the logs when a process ends or time is up before."""
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n---\n".join(process.text() for process in processes)
        assert all(process.process.poll() is None for process in processes), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.05)


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[Machine]]:
    """Two machines with a cable between them; skips, with the reason, where the system forbids it."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("two network namespaces need the programs ip and nsenter, which are not here")
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    inside = ("--user", "--preserve-credentials") if user else ()
    with contextlib.ExitStack() as stack:

        def namespace(*command: str) -> int:
            holder = subprocess.Popen([*command, "sh", "-c", "echo; exec sleep 3600"], stdout=subprocess.PIPE)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            if not holder.stdout.readline():
                pytest.skip("this system permits no network namespaces (unshare --net failed)")
            return holder.pid

        def enter(pid: int) -> tuple[str, ...]:
            return ("nsenter", "--target", str(pid), "--net", *inside)

        def run(pid: int, words: str) -> None:
            done = subprocess.run([*enter(pid), *words.split()], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"this system permits no virtual network ({words}: {done.stderr.strip()})")

        first = namespace("unshare", *user, "--net")
        second = namespace(
            "nsenter", "--target", str(first), *inside, *(() if inside else ("--net",)), "unshare", "--net"
        )
        run(first, f"ip link add cable0 type veth peer name cable1 netns {second}")
        for pid, name, address in ((first, "cable0", "10.77.4.1"), (second, "cable1", "10.77.4.2")):
            for words in (f"addr add {address}/24 dev {name}", f"link set {name} up", "link set lo up"):
                run(pid, f"ip {words}")
        yield [Machine("10.77.4.1", enter(first)), Machine("10.77.4.2", enter(second))]


def metrics(folder: Path) -> dict[int, float]:
    """Step -> loss, from a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


PYTHON = (sys.executable, "-u")
