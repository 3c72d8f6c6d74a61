"""Runs a program that a model has written: a process of its own with bounds, and nothing of ours in it.

What holds on every Linux: an empty environment, a fresh folder that is removed, no standard input, bounds on
processor time, memory, the size and number of files, and an end after some seconds. Where the kernel lets a
process without privileges have namespaces and a Landlock domain of its own, it reaches no network, writes
nowhere but in its folder, and no child outlives it. It may read what its user may read: for code that you
fear, use a container.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

_BOOTSTRAP = r"""
import ctypes, os, resource, signal, sys
seconds, memory, channel, word = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
program = sys.stdin.read()
def limit(name, value):
    hard = resource.getrlimit(name)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (value, value))
limit(resource.RLIMIT_CPU, seconds)
limit(resource.RLIMIT_AS, memory)
limit(resource.RLIMIT_FSIZE, 16 << 20)
limit(resource.RLIMIT_NOFILE, 64)
limit(resource.RLIMIT_CORE, 0)
libc = ctypes.CDLL(None, use_errno=True)
alone = 0x40000000 | 0x20000000  # CLONE_NEWNET | CLONE_NEWPID: no network, and its children end with it
if libc.unshare(alone | 0x10000000) == 0 or libc.unshare(alone) == 0:  # CLONE_NEWUSER
    child = os.fork()
    if child:  # out of the program's reach: it is told to end, and takes all of them along
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.setsid()
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
writes = 0x1FF2  # Landlock's first version: write, remove and make files and folders
class Rules(ctypes.Structure):
    _fields_ = [("handled", ctypes.c_uint64)]
class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]
rules = libc.syscall(444, ctypes.byref(Rules(writes)), ctypes.c_size_t(8), 0)
if rules >= 0:
    for path in (".", "/dev/null"):
        parent = os.open(path, os.O_PATH)
        allowed = writes if path == "." else 0x2
        libc.syscall(445, rules, 1, ctypes.byref(Beneath(allowed, parent)), 0)
        os.close(parent)
    libc.syscall(446, rules, 0)
    os.close(rules)
null = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
sys.argv[:] = [""]
scope = {"__name__": "__main__"}
try:
    exec(compile(program, "<answer>", "exec"), scope)
except BaseException as error:
    os.write(channel, ("!" + type(error).__name__ + ": " + str(error))[:300].encode("utf-8", "replace"))
else:
    os.write(channel, ("=" + word).encode())
"""


@dataclass(frozen=True)
class Outcome:
    """``reason``: why it did not pass, in a line."""

    passed: bool
    reason: str = ""


def run_program(program: str, *, seconds: int = 10, memory: int = 1 << 30) -> Outcome:
    """Whether a Python program runs to its end without an exception, in ``seconds`` and ``memory`` bytes.

    A program that leaves early (``sys.exit``, ``os._exit``) has not passed.
    """
    word = secrets.token_hex(16)
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="shardyard-sandbox-", ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(seconds), str(memory), str(writing), word],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                env={"HOME": folder, "TMPDIR": folder}, pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing)
        ended, started = True, time.monotonic()
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds + 5)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            _end(process)
    told = _told(reading) if ended else ""
    os.close(reading)
    if told == f"={word}":
        return Outcome(True)
    if told.startswith("!"):
        return Outcome(False, told[1:])
    if (
        not ended or time.monotonic() - started >= seconds
    ):  # also one that the bound on its processor time ended
        return Outcome(False, f"not done after {seconds} s")
    return Outcome(False, "ended without a word")


def _told(reading: int) -> str:
    """What lies in the pipe, without a wait: where there are no namespaces, a child may still hold it."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 4096).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started: its namespace, which its own end closes, and its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
