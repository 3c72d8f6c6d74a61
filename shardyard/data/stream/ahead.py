"""A process that makes the next windows while a run trains on this one. An optimisation and no more: a window
that it has not made is made by the rank that needs it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import struct
import threading
import time

from shardyard.data.stream.cache import WindowCache
from shardyard.data.workers import quiet_forks

logger = logging.getLogger("shardyard.data")

_AHEAD = 2
"""Windows that are made ahead."""

_PLACE = struct.Struct("<qq")
_LOOK_EVERY = 0.5
"""Seconds between two looks whether the parent is still there."""


class LookAhead:
    """Forks the process. ``at`` tells it where the run is."""

    def __init__(self, cache: WindowCache, workers: int) -> None:
        """It tokenises in ``workers`` processes."""
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        parent = os.getpid()
        with quiet_forks():
            self._process = multiprocessing.get_context("fork").Process(
                target=_run, args=(cache, workers, self._reading, parent), name="look-ahead"
            )
            self._process.start()
        self._parent = parent
        os.close(self._reading)

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._process.pid

    def at(self, epoch: int, window: int) -> None:
        """The run is at this window."""
        if self._writing >= 0:
            # A full pipe holds newer places than the process has read; one that died is made up for.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._writing, _PLACE.pack(epoch, window))

    def close(self) -> None:
        """End the process; nothing happens in a forked child, or a second time."""
        if self._writing < 0 or os.getpid() != self._parent:
            return
        os.close(self._writing)
        self._writing = -1
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def can_look_ahead() -> bool:
    """Whether the system forks processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def _run(cache: WindowCache, workers: int, places: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logger.setLevel(logging.ERROR)  # the ranks say what there is to say about the data
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    while True:
        place = _newest(places, wait=True)
        made = 0
        while place is not None and made < _AHEAD:
            place = _make_next(cache, place, workers)
            made += 1
            newer = _newest(places, wait=False)
            if newer is not None:
                place, made = newer, 0


def _make_next(cache: WindowCache, place: tuple[int, int], workers: int) -> tuple[int, int] | None:
    """The place of the window after this one, made; None where there is nothing to make ahead."""
    epoch, window = place
    try:
        for following in ((epoch, window + 1), (epoch + 1, 0)):
            if cache.get(*following, workers=workers) is not None:
                return following
    except Exception as error:  # the rank that needs the window meets the same fault, and tells it
        logger.debug("data: window %d of epoch %d is not made ahead: %s", window + 1, epoch, error)
    return None


def _newest(places: int, *, wait: bool) -> tuple[int, int] | None:
    """The last place that was told, if any has been since the last look."""
    newest = None
    while (wait and newest is None) or select.select([places], [], [], 0)[0]:
        newest = _PLACE.unpack(os.read(places, _PLACE.size))
    return newest


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os._exit(1)
