"""Which units make up which global batch: a function of the order and a cursor, never of the number of ranks.

Legend: G units of a global batch (micro-batch size x accumulation x data-parallel ranks). A unit is a sample,
or a pack of several (order.py). The *cursor* is a position in the endless sequence "epoch 0's units, epoch
1's units, ...".
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardyard.config import TrainingConfig
from shardyard.data.order import Order, Units
from shardyard.errors import UserError

Unit = tuple[int, ...]
"""The samples of one unit."""


@dataclass(frozen=True)
class GlobalBatch:
    """The units of one update over all ranks, in training order.

    ``start`` and ``end`` are cursors; ``end`` is where the next batch is asked for. With ``drop_last`` the
    units that are left out at an epoch's end are passed over, so ``start`` can lie behind the cursor that was
    asked for.
    """

    epoch: int
    start: int
    end: int
    units: Units

    @property
    def indices(self) -> np.ndarray:
        """All its samples, int64."""
        return self.units.indices


class Sampler(Protocol):
    """What a run asks of the source of its batches."""

    global_batch: int

    @property
    def shuffle(self) -> bool: ...

    @property
    def units_per_epoch(self) -> int | None:
        """Units of the first epoch; None where nobody knows before its end."""
        ...

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates of the first epoch; None where nobody knows before its end."""
        ...

    def last_step(self, *, cursor: int, step: int) -> int:
        """The number of the run's last update, when ``step`` updates have brought it to ``cursor``."""
        ...

    def steps_from(self, cursor: int, step: int | None = None) -> int:
        """The updates left from ``cursor``."""
        ...

    def global_batch_at(self, cursor: int) -> GlobalBatch:
        """The global batch that begins at ``cursor``."""
        ...

    def ends_epoch(self, cursor: int) -> bool:
        """Whether the batch that ends at ``cursor`` is its epoch's last."""
        ...


class ElasticSampler:
    """Cuts every epoch's units into global batches and counts the updates of a run.

    A batch never straddles two epochs: an epoch's last update takes the remainder, or drops it with
    ``drop_last``. ``max_steps > 0`` means exactly that many updates over as many epochs as they need;
    otherwise the run covers ``num_train_epochs`` epochs, of a fraction the nearest whole number of units, its
    last batch cut to fit (with ``drop_last``: whole batches only).

    The cursor counts units, so a run that resumes with other ranks or another global batch goes on with the
    next unseen one. With another global batch the batches are cut anew from there; ``max_steps`` still means
    that many updates over the whole run, while a run by epochs still covers the same samples in however many
    updates that takes (``last_step`` gives the number).

    Raises:
        UserError: no update would be made: no samples, no epochs, or fewer units than a batch with
        ``drop_last``.
    """

    def __init__(
        self, order: Order, *, global_batch: int, drop_last: bool, num_train_epochs: float, max_steps: int
    ) -> None:
        if order.size(0) < 1:
            raise UserError("data.dataset: no sample is left to train on")
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}; it must be at least 1")
        if drop_last and order.size(0) < global_batch:
            raise UserError(
                f"training.dataloader_drop_last: the data set has {order.size(0)} samples, fewer than one "
                f"global batch of {global_batch} (per_device_train_batch_size x gradient_accumulation_steps "
                "x data-parallel ranks), so every sample would be dropped; set it to false or make the "
                "batch smaller"
            )
        self.order = order
        self.global_batch = global_batch
        self.drop_last = drop_last
        self.num_train_epochs = num_train_epochs
        self.max_steps = max_steps
        self._starts = [0]
        """The cursor at which each epoch begins, as far as anyone has asked."""
        if self.total_steps < 1:
            raise UserError(
                f"training.num_train_epochs: {num_train_epochs} epochs of {order.size(0)} samples make no "
                f"update with global batches of {global_batch} (dataloader_drop_last: "
                f"{str(drop_last).lower()}); raise it, or set training.max_steps"
            )

    @classmethod
    def of(cls, training: TrainingConfig, order: Order, *, dp_size: int) -> ElasticSampler:
        """The sampler of a run whose ranks see ``dp_size`` different batches."""
        return cls(
            order,
            global_batch=global_batch_of(training, dp_size),
            drop_last=training.dataloader_drop_last,
            num_train_epochs=training.num_train_epochs,
            max_steps=training.max_steps,
        )

    @property
    def shuffle(self) -> bool:
        return self.order.shuffled

    @property
    def units_per_epoch(self) -> int:
        """The samples or packs of the first epoch."""
        return self.order.size(0)

    @property
    def updates_per_epoch(self) -> int:
        """The updates of the first epoch (packs differ in number from epoch to epoch)."""
        return self._updates(self.order.size(0))

    @property
    def total_steps(self) -> int:
        """The updates of the whole run, from its beginning."""
        return self.last_step(cursor=0, step=0)

    def last_step(self, *, cursor: int, step: int) -> int:
        if self.max_steps > 0:
            return max(self.max_steps, step)
        while (span := self._epoch_rest(cursor)) > 0:
            step += self._updates(span)
            cursor += span
        return step

    def steps_from(self, cursor: int, step: int | None = None) -> int:
        """The updates left from ``cursor``; ``step`` (those made so far) is derived from it by default."""
        if self.max_steps <= 0:
            return self.last_step(cursor=cursor, step=0)
        if step is None:
            epoch = self._epoch_of(cursor)
            sizes = [self.order.size(earlier) for earlier in range(epoch)]
            step = sum(map(self._updates, [*sizes, cursor - self._start(epoch)]))
        return self.last_step(cursor=cursor, step=step) - step

    def global_batch_at(self, cursor: int) -> GlobalBatch:
        """The global batch that begins at ``cursor``.

        Raises:
            IndexError: the run's samples end at or before ``cursor`` (never with ``max_steps``).
        """
        span = self._span_at(cursor)
        if span is None:
            raise IndexError(f"cursor {cursor} is past the last batch of this run")
        start, size = span
        epoch = self._epoch_of(start)
        begin = start - self._start(epoch)
        return GlobalBatch(epoch, start, start + size, self.order.units(epoch, begin, begin + size))

    def ends_epoch(self, cursor: int) -> bool:
        span = self._span_at(cursor)
        return span is None or self._epoch_of(span[0]) > self._epoch_of(cursor - 1)

    def _span_at(self, cursor: int) -> tuple[int, int] | None:
        """Where the batch begins that is asked for at ``cursor``, and its size; None when the run is over."""
        start, size = cursor, min(self.global_batch, self._epoch_rest(cursor))
        while self.drop_last and size < self.global_batch:
            epoch = self._epoch_of(start) + 1  # packs differ in number: it may be too short as well
            if self.max_steps <= 0 and epoch >= self.num_train_epochs:
                return None
            start = self._start(epoch)
            size = min(self.global_batch, self._epoch_rest(start))
        return (start, size) if size > 0 else None

    def _updates(self, units: int) -> int:
        return units // self.global_batch if self.drop_last else -(-units // self.global_batch)

    def _epoch_rest(self, cursor: int) -> int:
        """The units of the cursor's epoch that the run still covers from there on."""
        epoch = self._epoch_of(cursor)
        end = self._start(epoch + 1)
        if self.max_steps <= 0:
            whole = int(self.num_train_epochs)
            if epoch >= whole:
                share = self.num_train_epochs - whole if epoch == whole else 0.0
                end = self._start(epoch) + round(share * self.order.size(epoch))
        return max(end - cursor, 0)

    def _start(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + self.order.size(len(self._starts) - 1))
        return self._starts[epoch]

    def _epoch_of(self, cursor: int) -> int:
        while self._starts[-1] <= cursor:
            self._start(len(self._starts))
        return bisect_right(self._starts, cursor) - 1


def global_batch_of(training: TrainingConfig, dp_size: int) -> int:
    """G: the units of an update over all ranks."""
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * dp_size


def split_over_ranks(units: Units, *, dp_rank: int, dp_size: int, per_device: int) -> list[list[Unit]]:
    """This rank's micro-batches of a global batch, as units.

    Rank r takes every ``dp_size``-th unit from r on, in pieces of ``per_device``. Every rank gets equally
    many micro-batches (the number follows from the batch's length), because each is a forward and backward
    full of collectives; one that has no unit left is an empty list, which becomes a filler.
    """
    share = [units[number] for number in range(dp_rank, len(units), dp_size)]
    largest_share = -(-len(units) // dp_size)
    return [share[begin : begin + per_device] for begin in range(0, largest_share, per_device)]
