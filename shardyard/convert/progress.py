"""How far a conversion is: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta

logger = logging.getLogger("shardyard.convert")

_EVERY = 5.0
"""Seconds between two log lines."""


class ByteProgress:
    """Counts bytes of ``total``, of which an earlier run did ``done``. Use as a context manager."""

    def __init__(self, doing: str, total: int, *, done: int = 0) -> None:
        self._doing, self._total = doing, total
        self._before = self._bytes = done
        self._began = self._last_line = time.monotonic()
        self._bar = None

    def __enter__(self) -> ByteProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._bar = Progress(
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._doing, total=self._total, completed=self._bytes)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count bytes that are done."""
        self._bytes += count
        now = time.monotonic()
        if self._bar is not None:
            line = f"{self._doing}: {self.line(now - self._began)}"
            self._bar.update(self._task, completed=self._bytes, description=line)
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
