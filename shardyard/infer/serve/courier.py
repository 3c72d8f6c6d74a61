"""Events of an engine's thread -> the service's event loop: one call into the loop for all that wait."""

from __future__ import annotations

import asyncio
import threading

from shardyard.infer.types import Event


class Box:
    """The events of one request's answers, (number of the answer, event), as they arrive in the loop."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._came = asyncio.Event()
        self._closed = False

    def put(self, number: int, event: Event) -> None:
        if not self._closed:
            self._events.append((number, event))
            self._came.set()

    def wake(self) -> None:
        self._came.set()

    def close(self) -> None:
        """Take no more, and drop what has not been taken."""
        self._closed = True
        self._events.clear()

    async def take(self) -> list[tuple[int, Event]]:
        """All that have come, at least one, unless `wake` was called."""
        await self._came.wait()
        self._came.clear()
        events, self._events = self._events, []
        return events


class Courier:
    """Brings events into ``loop``. Safe to call from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._parcels: list[tuple[Box, int, Event]] = []

    def bring(self, box: Box, number: int, event: Event) -> None:
        with self._lock:
            self._parcels.append((box, number, event))
            is_first = len(self._parcels) == 1
        if is_first and not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:  # closed meanwhile: nobody is there to read
                return

    def _hand_out(self) -> None:
        with self._lock:
            parcels, self._parcels = self._parcels, []
        for box, number, event in parcels:
            box.put(number, event)
