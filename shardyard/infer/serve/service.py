"""What is served: one model behind one engine, with places for its requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardyard.infer.serve.courier import Courier
from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.limits import Limits
from shardyard.infer.serve.metrics import Metrics
from shardyard.infer.serve.running import Running, stopped
from shardyard.infer.serve.subject import Ask, Subject
from shardyard.infer.types import Engine

_Result = TypeVar("_Result")


class Service:
    """Used from one event loop. ``closing``: no new requests are taken."""

    def __init__(self, engine: Engine, subject: Subject, limits: Limits) -> None:
        self.engine, self.subject, self.limits = engine, subject, limits
        self.metrics = Metrics()
        self.started = int(time.time())
        self.closing = False
        self.active = 0
        """Answers that hold a place."""
        self._courier: Courier | None = None

    @property
    def refusal(self) -> ApiFault | None:
        """Why no request can be answered now; None when one can."""
        if self.engine.fault is not None:
            return stopped()
        if self.closing:
            return ApiFault(
                503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"}
            )
        return None

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Places for ``count`` answers, while the context lasts.

        Raises:
            ApiFault: 400, 429 or 503.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        most = self.limits.max_answers
        if count > most:
            raise ApiFault(
                400, f"{count} answers are asked for at once; this server takes {most}.", param="n"
            )
        if self.active + count > most:
            raise ApiFault(
                429, f"The server is busy: {self.active} answers are under way or waiting. Try again later.",
                code="queue_full", headers={"Retry-After": str(self._retry_after())},
            )  # fmt: skip
        self.active += count
        try:
            yield
        finally:
            self.active -= count

    def _retry_after(self) -> int:
        """The mean time of a request, whole seconds from 1 to 60."""
        whole = self.metrics.whole
        return min(60, max(1, math.ceil(whole.total / whole.count))) if whole.count else 1

    async def prepared(self, make: Callable[[], _Result]) -> _Result:
        """``make`` on the prompts' thread: a long prompt must not hold up the answers of others."""
        return await asyncio.get_running_loop().run_in_executor(self.subject.thread, make)

    def start(self, asks: Sequence[Ask], arrived: float) -> Running:
        """The answers under way; close them at the end.

        Raises:
            ApiFault: 400 or 503.
        """
        loop = asyncio.get_running_loop()
        if self._courier is None or self._courier.loop is not loop:
            self._courier = Courier(loop)
        return Running(asks, self.engine, self.subject.tokenizer, self._courier, self.metrics, arrived)

    def page(self) -> str:
        """The metrics."""
        return self.metrics.text(self.engine.load(), is_up=self.refusal is None, active=self.active)
