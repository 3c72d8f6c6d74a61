"""A map over batches in several processes whose results come in the order of the batches."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from shardyard.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2
"""Batches per process that are read before their results are wanted; bounds the memory."""

_SMALL_INPUT = 8 * 2**20
"""Bytes of input below which starting processes costs more than it saves."""


def default_workers(input_bytes: int, local_ranks: int) -> int:
    """Processes to tokenise with when the user names no number: this rank's share of the cores, at most 8."""
    if input_bytes < _SMALL_INPUT:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // max(local_ranks, 1), 8))


def ordered_map(
    work: Callable[[T], R],
    batches: Iterable[T],
    *,
    workers: int,
    setting: str = "data.preprocessing_num_workers",
) -> Iterator[R]:
    """Yield ``work(batch)`` for each batch, in order, from ``workers`` processes (1: in this one).

    ``work`` reaches the processes once, by fork where the system has it, so it may hold a tokenizer.
    ``setting`` is what the user turns to change ``workers``, for messages.

    Raises:
        UserError: a process died.
    """
    if workers <= 1:
        yield from map(work, batches)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with quiet_forks():
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context(method), initializer=_start, initargs=(work,)
        )
        try:
            yield from _in_order(pool, batches, workers * _AHEAD)
        except BrokenProcessPool as error:
            raise UserError(
                f"{setting}: one of {workers} tokenising processes died; most often memory ran out: set "
                f"fewer of them"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    for batch in batches:
        waiting.append(pool.submit(_run, batch))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_work: Callable[[Any], Any] | None = None  # of a tokenising process, set once when it starts


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends these
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _run(batch: Any) -> Any:
    assert _work is not None
    return _work(batch)


def _die_with_parent() -> None:
    """End this process when its parent is killed: it would wait for its next batch for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def quiet_forks() -> Iterator[None]:
    """Fork processes without the tokenizers library's warning about its threads, which a fork cuts off.

    It keeps to one thread in processes that see this variable; it can be told in no other way.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
