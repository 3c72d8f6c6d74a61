"""How far a conversion is: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from shardyard.progress import Bar

logger = logging.getLogger("shardyard.convert")

_EVERY = 5.0
"""Seconds between two log lines."""


class ByteProgress:
    """Counts bytes of ``total``, of which an earlier run did ``done``. Use as a context manager."""

    def __init__(self, doing: str, total: int, *, done: int = 0) -> None:
        self._doing, self._total = doing, total
        self._before = self._bytes = done
        self._began = self._last_line = time.monotonic()
        self._bar = Bar(doing, total, done)

    def __enter__(self) -> ByteProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def advance(self, count: int) -> None:
        """Count bytes that are done."""
        self._bytes += count
        now = time.monotonic()
        if self._bar.is_shown:
            line = f"{self._doing}: {self.line(now - self._began)}"
            self._bar.show(self._bytes, line)
        elif now - self._last_line >= _EVERY:
            self._last_line = now
            logger.info("%s: %s", self._doing, self.line(now - self._began))

    def reach(self, done: int, total: int) -> None:
        """``done`` bytes of ``total`` are done in all."""
        self._total = total
        self.advance(done - self._bytes)

    def line(self, seconds: float) -> str:
        """The state after ``seconds`` of work: share, rate, time left."""
        rate = (self._bytes - self._before) / max(seconds, 1e-9)
        left = timedelta(seconds=round((self._total - self._bytes) / rate)) if rate else "unknown time"
        share = 100 * self._bytes / self._total if self._total else 100.0
        return f"{share:.1f} % of {self._total / 2**20:,.1f} MiB, {rate / 2**20:,.1f} MiB/s, {left} left"
