"""Windows of rows: a stretch of ``data.buffer_size`` rows of an epoch, all of it in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from shardyard.data.stream.mixture import Mixture

_READ_RATHER_THAN_SKIP = 8
"""Skipping a row costs roughly this much less than reading it, but starts at the first row."""


class RowReader:
    """Gives the rows of any window; cheapest in order, since files then stay open."""

    def __init__(self, mixture: Mixture, rows_per_window: int) -> None:
        self.rows_per_window = rows_per_window
        self._mixture = mixture
        self._close()

    def rows(self, window: int) -> list[tuple[int, Any]]:
        """(number of the source, row) of each; fewer than ``rows_per_window`` only at the epoch's end.

        Raises:
            UserError: as the sources raise.
        """
        rows = self._at(window)
        found = list(islice(rows, self.rows_per_window))
        self._open = (os.getpid(), window + 1, rows)
        return found

    def _at(self, window: int) -> Iterator[tuple[int, Any]]:
        """The rows from the window's first on."""
        opened = self._open
        self._close()  # an iterator that raises has ended, which must not be taken for the data's end
        if opened is not None:
            pid, position, rows = opened
            gap = window - position
            # A forked process shares its parent's place in the file: it opens its own.
            if pid == os.getpid() and 0 <= gap * _READ_RATHER_THAN_SKIP <= window:
                skipped = gap * self.rows_per_window
                next(islice(rows, skipped, skipped), None)
                return rows
        return self._mixture.rows(window * self.rows_per_window)

    def _close(self) -> None:
        self._open: tuple[int, int, Iterator[tuple[int, Any]]] | None = None
        """(process, next window, its rows)"""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}
