"""The bar of long work, on a terminal."""

from __future__ import annotations

import sys


class Bar:
    """A bar with a line of text, on a terminal; elsewhere nothing, and `show` says so. A context manager."""

    def __init__(self, doing: str, total: int, done: int = 0) -> None:
        self._doing, self._total, self._done = doing, total, done
        self._bar = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._doing, total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def show(self, done: int, line: str) -> None:
        """``done`` of the total, and what is said beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=line)
