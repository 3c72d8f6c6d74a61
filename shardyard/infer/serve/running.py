"""The answers of one request under way in the engine, until they end or nobody wants them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from shardyard.infer.serve.courier import Box, Courier
from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.growing import Growing, Piece
from shardyard.infer.serve.metrics import Metrics
from shardyard.infer.serve.subject import Ask
from shardyard.infer.types import Engine, Event, Token

logger = logging.getLogger("shardyard.serve")

_LOOK_S = 0.5
"""How often a request that hears nothing looks whether its engine is alive."""


def stopped() -> ApiFault:
    """The fault of all requests once the engine is at fault."""
    return ApiFault(503, "The model has stopped working; the server ends.", code="engine_stopped")


class Running:
    """Submits ``asks``; `pieces` gives what is new of them. `close` it: what still runs is cancelled then.

    Raises:
        ApiFault: 400, what the engine refuses; 503, it has stopped.
    """

    def __init__(
        self, asks: Sequence[Ask], engine: Engine, tokenizer: Any, courier: Courier, metrics: Metrics,
        arrived: float,
    ) -> None:  # fmt: skip
        self._engine, self._metrics, self._arrived = engine, metrics, arrived
        self._box = Box()
        self._growing = {number: Growing(ask, tokenizer) for number, ask in enumerate(asks)}
        self._ids: dict[int, str] = {}
        self._last: dict[int, float] = {}
        """When each answer got its last token."""
        try:
            for number, ask in enumerate(asks):
                self._ids[number] = self._submit(ask, partial(courier.bring, self._box, number))
        except ApiFault:
            self.close()
            raise

    def _submit(self, ask: Ask, deliver: Callable[[Event], None]) -> str:
        try:
            return self._engine.submit(ask.request, deliver)
        except ValueError as error:
            raise ApiFault(400, f"{error}.", code="invalid_value") from None
        except RuntimeError:  # it has stopped
            raise stopped() from None

    async def pieces(self) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """What is new of the answers, each by its number, as it comes; the end once all have ended.

        A reader that is slow gets more at a time.

        Raises:
            ApiFault: 500 or 503, an answer or the engine is at fault.
        """
        looking = asyncio.create_task(self._look())
        try:
            while self._growing:
                events = await self._box.take()
                if new := self._taken(events):
                    yield list(new.items())
                elif self._engine.fault is not None:
                    raise stopped()
            self._metrics.whole.add(time.perf_counter() - self._arrived)
        finally:
            looking.cancel()

    def close(self) -> None:
        """Cancel what still runs, and forget its events."""
        self._box.close()
        self._metrics.cancelled += len(self._ids)
        for request_id in self._ids.values():
            self._engine.cancel(request_id)
        self._ids.clear()

    def _taken(self, events: Sequence[tuple[int, Event]]) -> dict[int, Piece]:
        new: dict[int, Piece] = {}
        for number, event in events:
            answer = self._growing.get(number)
            if answer is None:  # its stop text has come
                continue
            self._note(number, event)
            piece = answer.take(event)
            new.setdefault(number, Piece()).add(piece)
            if answer.ended:
                del self._growing[number]
                self._ended(number, event, piece)
        return new

    def _ended(self, number: int, event: Event, piece: Piece) -> None:
        request_id = self._ids.pop(number)
        if isinstance(event, Token):  # by a stop text, of which the engine does not know
            self._engine.cancel(request_id)
        if piece.reason in ("stop", "length", "tool_calls"):
            return
        logger.warning("%s: %s %s", request_id, piece.reason, piece.error)
        if self._engine.fault is not None or piece.reason == "cancelled":  # by the engine's end
            raise stopped()
        raise ApiFault(500, "The answer could not be generated.", code="generation_failed")

    def _note(self, number: int, event: Event) -> None:
        if not isinstance(event, Token):
            return
        now, last = time.perf_counter(), self._last.get(number)
        self._last[number] = now
        if last is None:
            self._metrics.first_token.add(now - self._arrived)
        else:
            self._metrics.per_token.add(now - last)

    async def _look(self) -> None:
        """An engine that has died may never deliver another event."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._engine.fault is not None:
                self._box.wake()
