"""Which units of a stream make up which global batch: a function of the windows and a cursor.

The cursor is an address (``address``): epoch, window and number of the next unit. It means the same for any
number of ranks, loader workers and accumulation steps.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from shardyard.data.order import Units
from shardyard.data.sampler import GlobalBatch
from shardyard.data.stream.address import address, place
from shardyard.data.stream.cache import WindowCache
from shardyard.data.stream.store import Taken
from shardyard.errors import UserError

_KEPT_WINDOWS = 4
_KEPT_BATCHES = 64
"""Windows are kept while they are among the last so many, or hold units of so many last batches: loader
workers and other ranks read behind.
"""


class Ahead(Protocol):
    """Told where the run is: a ``LookAhead``."""

    def at(self, epoch: int, window: int) -> None: ...


class StreamSampler:
    """Cuts a stream into global batches; fulfils ``shardyard.data.sampler.Sampler``.

    A batch takes the next G units across windows. It never straddles two epochs: an epoch's last batch takes
    the remainder. The run makes ``max_steps`` updates over as many epochs as they need.
    """

    def __init__(
        self,
        cache: WindowCache,
        taken: Taken,
        *,
        global_batch: int,
        max_steps: int,
        shuffle: bool,
        ahead: Ahead | None = None,
        removes: bool = False,
    ) -> None:
        """``removes``: this rank deletes the windows that its node has done with."""
        if global_batch < 1 or max_steps < 1:
            raise ValueError(f"global_batch {global_batch} and max_steps {max_steps} must be at least 1")
        self.global_batch = global_batch
        self.max_steps = max_steps
        self.shuffle = shuffle
        self._cache = cache
        self._taken = taken
        self._ahead = ahead
        self._removes = removes
        self._entered: deque[tuple[int, int]] = deque(maxlen=_KEPT_WINDOWS)
        self._begun: deque[tuple[int, int]] = deque(maxlen=_KEPT_BATCHES)

    @property
    def units_per_epoch(self) -> int | None:
        """Nobody knows before an epoch's end."""
        return None

    @property
    def updates_per_epoch(self) -> int | None:
        """Nobody knows before an epoch's end."""
        return None

    def last_step(self, *, cursor: int, step: int) -> int:
        return max(self.max_steps, step)

    def steps_from(self, cursor: int, step: int | None = None) -> int:
        """Raises ValueError without ``step`` at any cursor but the first: a stream cannot tell it."""
        if step is None and cursor:
            raise ValueError("a stream does not know how many updates lead to a cursor")
        return self.last_step(cursor=cursor, step=step or 0) - (step or 0)

    def global_batch_at(self, cursor: int) -> GlobalBatch:
        """The batch that begins at ``cursor``, or with the first unit after it.

        Raises:
            UserError: a window cannot be made, or a whole epoch has no unit.
        """
        epoch, window, number = self._next_unit(*place(cursor))
        start = address(epoch, window, number)
        self._forget_behind(epoch, window)
        parts: list[Units] = []
        missing = self.global_batch
        while missing and (units := self._units(epoch, window)) is not None:
            part = units.part(number, min(number + missing, len(units)))
            parts.append(_numbered(part, address(epoch, window, 0)))
            missing -= len(part)
            number += len(part)
            if number == len(units):
                window, number = window + 1, 0
        end = address(*self._behind(epoch, window, number))
        return GlobalBatch(epoch, start, end, _joined(parts))

    def ends_epoch(self, cursor: int) -> bool:
        """The end of an epoch's last batch is the first place of the next epoch."""
        _, window, number = place(cursor)
        return cursor > 0 and window == number == 0

    def _next_unit(self, epoch: int, window: int, number: int) -> tuple[int, int, int]:
        """The place of the first unit from here on."""
        whole = window == number == 0
        while True:
            units = self._units(epoch, window)
            if units is None:
                if whole:
                    raise UserError(
                        "\n".join(
                            [
                                f"data.dataset: no sample in a whole pass over the {self._taken.report.unit}",
                                *self._taken.report.lines(),
                            ]
                        )
                    )
                epoch, window, number, whole = epoch + 1, 0, 0, True
            elif number < len(units):
                return epoch, window, number
            elif number > len(units):
                raise UserError(
                    f"the position to go on from is unit {number} of window {window} of epoch {epoch}, which "
                    f"has {len(units)}: the data or its settings are others than where it was saved"
                )
            else:
                window, number = window + 1, 0

    def _behind(self, epoch: int, window: int, number: int) -> tuple[int, int, int]:
        """Where the next batch begins: in this epoch if it has a unit left, else at the next one's start."""
        while number == 0 and window > 0:
            units = self._units(epoch, window)
            if units is None:
                return epoch + 1, 0, 0
            if len(units):
                break
            window += 1
        return epoch, window, number

    def _units(self, epoch: int, window: int) -> Units | None:
        """The units of a window; None past the epoch's end."""
        found = self._cache.get(epoch, window)
        if found is None:
            return None
        if self._taken.enter(epoch, window, found.report):
            self._entered.append((epoch, window))
            if self._ahead is not None:
                self._ahead.at(epoch, window)
        return found.units

    def _forget_behind(self, epoch: int, window: int) -> None:
        """Delete what neither the last batches nor the last windows need."""
        if not self._removes:
            return
        new_window = not self._begun or self._begun[-1] != (epoch, window)
        self._begun.append((epoch, window))
        if new_window:
            self._cache.remove_before(*min(self._begun[0], self._entered[0]))


def _numbered(units: Units, first: int) -> Units:
    """Samples by their numbers in the stream."""
    return Units(units.indices + first, units.offsets)


def _joined(parts: list[Units]) -> Units:
    indices = np.concatenate([part.indices for part in parts])
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Units(indices, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
