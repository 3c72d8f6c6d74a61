"""How far a long preparation is: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta

from shardyard.progress import Bar

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


class InputProgress:
    """How much of an input of ``total`` bytes is tokenised, with the speed and the time that is left.

    ``done`` bytes were tokenised by an earlier run. Elsewhere than on a terminal a line is logged every few
    seconds, or every ``every_documents`` documents. Use as a context manager.
    """

    def __init__(self, total: int, *, done: int = 0, every_documents: int | None = None) -> None:
        self._total = total
        self._bytes = self._done_before = done
        self._documents = self._tokens = 0
        self._every_documents = every_documents
        self._lines_before = 0
        self._began = self._last_line = time.monotonic()
        self._bar = Bar("tokenising", total, done)

    def __enter__(self) -> InputProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def advance(self, input_bytes: int, documents: int, tokens: int) -> None:
        """Count a batch that is done."""
        self._bytes += input_bytes
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        if self._bar.is_shown:
            line = self.line(now - self._began)
            self._bar.show(self._bytes, line)
        elif self._is_due(now):
            self._last_line = now
            logger.info("tokenising: %s", self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """The state after ``seconds`` of work."""
        speed = (self._bytes - self._done_before) / max(seconds, 1e-9)
        left = max(self._total - self._bytes, 0) / speed if speed else None
        share = f"{100 * self._bytes / self._total:.1f} %, " if self._total else ""
        return (
            f"{share}{self._documents:,} documents, {self._tokens:,} tokens, "
            f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            + ("time left unknown" if left is None else f"{timedelta(seconds=round(left))} left")
        )

    def _is_due(self, now: float) -> bool:
        if self._every_documents is None:
            return now - self._last_line >= _EVERY
        lines = self._documents // self._every_documents
        due = lines > self._lines_before
        self._lines_before = lines
        return due
