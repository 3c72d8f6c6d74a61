"""How far a long preparation is: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time

logger = logging.getLogger("shardyard.data")

_EVERY = 5.0
"""Seconds between two log lines."""


class Progress:
    """Counts ``unit`` (rows, documents) of ``total``, if that is known. Use as a context manager."""

    def __init__(self, unit: str, total: int | None) -> None:
        self._unit = unit
        self._total = total
        self._done = 0
        self._began = self._last_line = time.monotonic()
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("Tokenising"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        now = time.monotonic()
        if now - self._last_line >= _EVERY:
            self._last_line = now
            logger.info("%s", self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """The state after ``seconds`` of work: done, speed, and the time left where the total is known."""
        speed = self._done / max(seconds, 1e-9)
        if self._total is None:
            return f"tokenising: {self._done} {self._unit}, {speed:.0f} {self._unit}/s"
        left = max(self._total - self._done, 0) / max(speed, 1e-9)
        return (
            f"tokenising: {self._done}/{self._total} {self._unit}, {speed:.0f} {self._unit}/s, {left:.0f} s "
            "left"
        )
