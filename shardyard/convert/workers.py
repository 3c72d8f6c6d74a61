"""Files that are made side by side, each by a process of its own; one after the other with one worker.

Workers are new processes, not forks: torch has threads by the time they start. They end with the process that
started them, however it ends, so nothing writes into a folder that the next run may take up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from shardyard.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Told the bytes that are done since it was told last."""


def run_tasks(
    tasks: Sequence[Task],
    function: Callable[[Task, Advance], Result],
    *,
    workers: int,
    advance: Advance,
    done: Callable[[Task, Result], None],
) -> None:
    """Call ``function(task, advance)`` for every task, and ``done`` here, in the order in which they end.

    With more than one worker the function, tasks and results have to be picklable.

    Raises:
        UserError: of a task, or a worker was killed. The other workers are ended.
    """
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            done(task, function(task, advance))
        return
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, tuple[Any, Task]] = {}
    left = list(tasks)[::-1]
    processes: list[Any] = []
    try:
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = process, left.pop()
            ours.send(pipes[ours][1])
        while pipes:
            for pipe in wait(list(pipes)):
                _hear(pipe, pipes, left, advance, done)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _hear(
    pipe: Any,
    pipes: dict[Any, tuple[Any, Any]],
    left: list[Any],
    advance: Advance,
    done: Callable[[Any, Any], None],
) -> None:
    """One message of a worker; when its task is done, the next one."""
    process, task = pipes[pipe]
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join()
        raise UserError(
            f"a worker was ended from outside (exit code {process.exitcode}); if memory ran out, give fewer "
            "--workers. Finished files are kept, the same command goes on from there"
        ) from None
    if kind == "bytes":
        advance(value)
    elif kind == "error":
        raise value
    else:
        done(task, value)
        if left:
            pipes[pipe] = process, left.pop()
            pipe.send(pipes[pipe][1])
        else:
            pipe.send(None)
            del pipes[pipe]


def _work(pipe: Connection, function: Callable[[Any, Advance], Any]) -> None:
    """A worker: tasks until there are no more."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (task := pipe.recv()) is not None:
            try:
                result = function(task, lambda count: pipe.send(("bytes", count)))
            except Exception as error:
                pipe.send(("error", _portable(error)))
                return
            pipe.send(("result", result))


def _portable(error: Exception) -> Exception:
    """An error that survives the way to the parent."""
    if isinstance(error, UserError):
        return UserError(str(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:  # it was gone before
            os._exit(1)
