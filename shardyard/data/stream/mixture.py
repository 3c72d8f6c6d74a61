"""In which order the rows of several entries come: row r of an epoch is a function of r and the files.

``concat``: one entry after the other. ``interleave_under`` and ``interleave_over`` take rows by share in a
fixed pattern (smooth weighted round robin: the entry that lags most behind its share is next, so shares hold
in every stretch). Under ends the epoch with the last row of the entry that ends first; over goes on until
every entry has come to its end once, and begins those again that have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np

from shardyard.errors import UserError

Strategy: TypeAlias = Literal["concat", "interleave_under", "interleave_over"]

_LONGEST_PATTERN = 2**16
"""Rows after which a pattern repeats, at most; shares that need more are rounded to it."""


@dataclass(frozen=True)
class Source:
    """One entry: ``open(skip)`` gives its rows after the first ``skip``, ``count()`` how many it has."""

    name: str
    open: Callable[[int], Iterator[Any]]
    count: Callable[[], int]


class Mixture:
    """The rows of an epoch from any row on.

    Files are counted only where an entry turns out to have fewer rows than are to be skipped.
    """

    def __init__(
        self, sources: Sequence[Source], strategy: Strategy, shares: Sequence[float] | None = None
    ) -> None:
        """``shares`` (None: equal) say how often each source is taken when interleaving."""
        self._sources = sources
        self._over = strategy == "interleave_over"
        self._pattern: np.ndarray | None = None
        if strategy != "concat" and len(sources) > 1:
            self._pattern = pattern(shares or [1.0] * len(sources))

    def rows(self, start: int) -> Iterator[tuple[int, Any]]:
        """(number of the source, row) from row ``start`` of an epoch to its end."""
        if self._pattern is None:
            return self._one_after_the_other(start)
        return self._interleaved(start, self._pattern)

    def _one_after_the_other(self, skip: int) -> Iterator[tuple[int, Any]]:
        for number, source in enumerate(self._sources):
            found = False
            for row in source.open(skip):
                found = True
                yield number, row
            skip = 0 if found or not skip else skip - source.count()

    def _interleaved(self, start: int, order: np.ndarray) -> Iterator[tuple[int, Any]]:
        numbers = range(len(self._sources))
        rounds, rest = divmod(start, len(order))
        taken = rounds * np.bincount(order, minlength=len(numbers))
        taken += np.bincount(order[:rest], minlength=len(numbers))
        turns = [_Turns(source, int(n)) for source, n in zip(self._sources, taken, strict=True)]
        picks = order.tolist()
        for position in count(start):
            ended = sum(turn.has_ended for turn in turns)
            if ended == len(turns) or (ended and not self._over):
                return
            number = picks[position % len(picks)]
            yield number, turns[number].take()


class _Turns:
    """The rows of one source over and over, and whether its end was reached. Looks one row ahead."""

    def __init__(self, source: Source, taken: int) -> None:
        self._source = source
        self._rows = source.open(taken)
        self._ahead = next(self._rows, None)
        self.has_ended = self._ahead is None
        if self.has_ended:
            rows = source.count()
            if not rows:
                raise UserError(f"data.dataset: {source.name}: no rows")
            self._begin(taken % rows)

    def take(self) -> Any:
        if self._ahead is None:
            self._begin(0)
        row, self._ahead = self._ahead, next(self._rows, None)
        self.has_ended = self.has_ended or self._ahead is None
        return row

    def _begin(self, skip: int) -> None:
        self._rows = self._source.open(skip)
        self._ahead = next(self._rows, None)
        if self._ahead is None:
            raise UserError(f"data.dataset: {self._source.name}: its files changed while the run reads them")


def pattern(shares: Sequence[float]) -> np.ndarray:
    """The source of each row of a period, int64 [D].

    With whole weights of sum D, source k is taken weight k times in a period: whoever lags most behind comes
    next, the first of them when equal. No lag falls to -D and each is a multiple of D after D rows, so all
    are 0 again: the pattern repeats.
    """
    weights = _whole_weights(shares)
    period = int(weights.sum())
    lag = np.zeros(len(weights), np.int64)
    order = np.empty(period, np.int64)
    for row in range(period):
        lag += weights
        order[row] = lag.argmax()
        lag[order[row]] -= period
    return order


def _whole_weights(shares: Sequence[float]) -> np.ndarray:
    """Small whole numbers in the ratio of the shares; rounded where only large ones would do."""
    parts = [Fraction(share / sum(shares)).limit_denominator(1000) for share in shares]
    scale = math.lcm(*(part.denominator for part in parts))
    if min(parts) == 0 or sum(parts) != 1 or scale > _LONGEST_PATTERN:
        scale = _LONGEST_PATTERN
        parts = [Fraction(share / sum(shares)) for share in shares]
    return np.array([max(1, round(part * scale)) for part in parts], np.int64)
