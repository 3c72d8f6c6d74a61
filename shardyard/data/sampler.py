"""Which samples make up which global batch: a function of (seed, epoch, index), never of the number of ranks.

Legend: N samples of the data set, G samples of a global batch (micro-batch size x accumulation x
data-parallel ranks), U updates of an epoch. The *cursor* is a position in the endless sequence "epoch 0's N
samples, epoch 1's N samples, ...".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardyard.config import TrainingConfig
from shardyard.errors import UserError


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one update over all ranks: ``indices`` int64 [end - start] in training order.

    ``start`` and ``end`` are cursors; ``end`` is where the next batch is asked for. With ``drop_last`` the
    samples that are left out at an epoch's end are passed over, so ``start`` can lie behind the cursor that
    was asked for.
    """

    epoch: int
    start: int
    end: int
    indices: np.ndarray


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch, int64 [N]: a permutation that depends on seed and epoch only.

    Sorted raw words of a counter-based generator rather than ``Generator.permutation``: numpy keeps a bit
    generator's words for ever but not the algorithms on top of them, and an order must survive an upgrade
    between save and resume.
    """
    words = np.random.Philox(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(num_samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class ElasticSampler:
    """Cuts every epoch's order into global batches and counts the updates of a run.

    A batch never straddles two epochs: an epoch's last update takes the remainder, or drops it with
    ``drop_last``. ``max_steps > 0`` means exactly that many updates over as many epochs as they need;
    otherwise the run covers ``round(num_train_epochs * N)`` samples, its last batch cut to fit (with
    ``drop_last``: whole batches only).

    The cursor counts samples, so a run that resumes with other ranks or another global batch goes on with the
    next unseen sample. With another global batch the batches are cut anew from there; ``max_steps`` still
    means that many updates over the whole run, while a run by epochs still covers the same samples in however
    many updates that takes (``last_step`` gives the number).

    Raises:
        UserError: no update would be made: no samples, no epochs, or fewer samples than a batch with
        ``drop_last``.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        num_train_epochs: float,
        max_steps: int,
    ) -> None:
        if num_samples < 1:
            raise UserError("data.dataset: no sample is left to train on")
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}; it must be at least 1")
        if drop_last and num_samples < global_batch:
            raise UserError(
                f"training.dataloader_drop_last: the data set has {num_samples} samples, fewer than one "
                f"global batch of {global_batch} (per_device_train_batch_size x gradient_accumulation_steps "
                "x data-parallel ranks), so every sample would be dropped; set it to false or make the "
                "batch smaller"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.max_steps = max_steps
        self._limit = round(num_train_epochs * num_samples)
        self._order: tuple[int, np.ndarray] | None = None
        if self.total_steps < 1:
            raise UserError(
                f"training.num_train_epochs: {num_train_epochs} epochs of {num_samples} samples make no "
                f"update with global batches of {global_batch} (dataloader_drop_last: "
                f"{str(drop_last).lower()}); raise it, or set training.max_steps"
            )

    @classmethod
    def of(cls, training: TrainingConfig, num_samples: int, *, dp_size: int) -> ElasticSampler:
        """The sampler of a run whose ranks see ``dp_size`` different batches."""
        return cls(
            num_samples,
            global_batch=training.per_device_train_batch_size
            * training.gradient_accumulation_steps
            * dp_size,
            seed=training.seed,
            shuffle=not training.disable_shuffling,
            drop_last=training.dataloader_drop_last,
            num_train_epochs=training.num_train_epochs,
            max_steps=training.max_steps,
        )

    @property
    def updates_per_epoch(self) -> int:
        """U: the updates of one whole epoch."""
        return self._updates(self.num_samples)

    @property
    def total_steps(self) -> int:
        """The updates of the whole run, from its beginning."""
        return self.last_step(cursor=0, step=0)

    @property
    def total_samples(self) -> int:
        """The samples trained by the whole run, from its beginning, without those that are dropped."""
        epochs, updates = divmod(self.total_steps, self.updates_per_epoch)
        if self.max_steps <= 0 and not self.drop_last:
            return self._limit
        per_epoch = self.updates_per_epoch * self.global_batch if self.drop_last else self.num_samples
        return epochs * per_epoch + updates * self.global_batch

    def last_step(self, *, cursor: int, step: int) -> int:
        """The number of the run's last update, when ``step`` updates have brought it to ``cursor``."""
        if self.max_steps > 0:
            return max(self.max_steps, step)
        left = max(self._limit - cursor, 0)
        of_this_epoch = min(self.num_samples - cursor % self.num_samples, left)
        whole_epochs, rest = divmod(left - of_this_epoch, self.num_samples)
        return (
            step + self._updates(of_this_epoch) + whole_epochs * self.updates_per_epoch + self._updates(rest)
        )

    def steps_from(self, cursor: int, step: int | None = None) -> int:
        """The updates left from ``cursor``; ``step`` (those made so far) is derived from it by default."""
        if self.max_steps <= 0:
            return self.last_step(cursor=cursor, step=0)
        if step is None:
            epochs, offset = divmod(cursor, self.num_samples)
            step = epochs * self.updates_per_epoch + self._updates(offset)
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
        epoch, offset = divmod(start, self.num_samples)
        return GlobalBatch(epoch, start, start + size, self._epoch_slice(epoch, offset, offset + size))

    def ends_epoch(self, cursor: int) -> bool:
        """Whether the batch that ends at ``cursor`` is its epoch's last."""
        span = self._span_at(cursor)
        return span is None or span[0] // self.num_samples > (cursor - 1) // self.num_samples

    def _span_at(self, cursor: int) -> tuple[int, int] | None:
        """Where the batch begins that is asked for at ``cursor``, and its size; None when the run is over."""
        start, size = cursor, self._size_at(cursor)
        if self.drop_last and size < self.global_batch:
            start = (cursor // self.num_samples + 1) * self.num_samples
            size = self._size_at(start)
        whole = size > 0 and not (self.drop_last and size < self.global_batch)
        return (start, size) if whole else None

    def _updates(self, samples: int) -> int:
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)

    def _size_at(self, cursor: int) -> int:
        size = min(self.global_batch, self.num_samples - cursor % self.num_samples)
        return size if self.max_steps > 0 else min(size, self._limit - cursor)

    def _epoch_slice(self, epoch: int, begin: int, end: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(begin, end, dtype=np.int64)
        if self._order is None or self._order[0] != epoch:
            self._order = None  # freed before the next is built: one order in memory at a time
            self._order = (epoch, epoch_order(self.num_samples, self.seed, epoch))
        return self._order[1][begin:end].copy()


def split_over_ranks(batch: GlobalBatch, *, dp_rank: int, dp_size: int, per_device: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch, as sample indices.

    Rank r takes ``indices[r::dp_size]`` in pieces of ``per_device``. Every rank gets equally many
    micro-batches (the number follows from the batch's length), because each is a forward and backward full of
    collectives; one that has no sample left is an empty list, which becomes a filler.
    """
    share = batch.indices[dp_rank::dp_size].tolist()
    largest_share = -(-len(batch.indices) // dp_size)
    return [share[begin : begin + per_device] for begin in range(0, largest_share, per_device)]
