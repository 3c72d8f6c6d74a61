"""What an epoch holds and in which order: a function of (seed, epoch) alone, whatever the ranks and workers.

Legend: N samples of the data, U units of an epoch. A *unit* is what the run's cursor counts and what a batch
is made of: one sample, or a pack of several samples that share a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardyard.data.packing import best_fit


@dataclass(frozen=True)
class Units:
    """Consecutive units; unit k holds the samples ``indices[offsets[k] : offsets[k + 1]]``."""

    indices: np.ndarray
    """int64 [samples of all units], numbers of samples in the store."""
    offsets: np.ndarray
    """int64 [units + 1], from 0."""

    @classmethod
    def singles(cls, indices: np.ndarray) -> Units:
        """Each sample a unit of its own."""
        return cls(indices, np.arange(len(indices) + 1, dtype=np.int64))

    @classmethod
    def packs(cls, packs: Sequence[np.ndarray]) -> Units:
        """Each array of samples a unit."""
        indices = np.concatenate([np.empty(0, np.int64), *packs])
        lengths = np.fromiter(map(len, packs), np.int64, len(packs))
        return cls(indices, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> tuple[int, ...]:
        """The samples of one unit."""
        return tuple(self.indices[self.offsets[number] : self.offsets[number + 1]].tolist())

    def part(self, begin: int, end: int) -> Units:
        """Units ``begin`` to ``end``."""
        offsets = self.offsets[begin : end + 1]
        return Units(self.indices[offsets[0] : offsets[-1]].copy(), offsets - offsets[0])


class Order(Protocol):
    """The units of each epoch, in training order."""

    @property
    def shuffled(self) -> bool:
        """Whether epochs differ in order."""
        ...

    def size(self, epoch: int) -> int:
        """U of this epoch."""
        ...

    def units(self, epoch: int, begin: int, end: int) -> Units:
        """Units ``begin`` to ``end`` of this epoch."""
        ...

    def describe(self) -> str:
        """All that the order depends on beside the samples, as text: a cursor counts in this order only."""
        ...


def epoch_order(num_samples: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """The order of one epoch, int64 [N]: a permutation that depends on its arguments only.

    ``stream`` keeps apart what one seed orders: 0 is the whole data, others parts of it.

    Sorted raw words of a counter-based generator rather than ``Generator.permutation``: numpy keeps a bit
    generator's words for ever but not the algorithms on top of them, and an order must survive an upgrade
    between save and resume.
    """
    entropy = [seed % 2**64, epoch, stream] if stream else [seed % 2**64, epoch]
    words = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(num_samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class EpochOrder:
    """Every sample once per epoch, shuffled anew in each; in natural order without ``shuffle``.

    ``samples`` is N, or the numbers of the samples that take part (int64 [N]).
    """

    def __init__(self, samples: int | np.ndarray, *, seed: int, shuffle: bool) -> None:
        self._chosen = None if isinstance(samples, int) else samples
        self._num_samples = samples if isinstance(samples, int) else len(samples)
        self._seed = seed
        self.shuffled = shuffle
        self._kept: tuple[int, np.ndarray] | None = None

    def size(self, epoch: int) -> int:
        return self._num_samples

    def units(self, epoch: int, begin: int, end: int) -> Units:
        if self.shuffled:
            numbers = self._permutation(epoch)[begin:end].copy()
        else:
            numbers = np.arange(begin, end, dtype=np.int64)
        return Units.singles(numbers if self._chosen is None else self._chosen[numbers])

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = None  # freed before the next is built: one permutation in memory at a time
            self._kept = (epoch, epoch_order(self._num_samples, self._seed, epoch))
        return self._kept[1]

    def describe(self) -> str:
        return f"seed {self._seed}, shuffled {self.shuffled}"


class MixedOrder:
    """Several data sets in fixed shares, evenly interleaved.

    An epoch takes ``counts[d]`` samples of data set d. Each data set goes through its own samples in passes
    of its own: a small share goes on in the next epoch where this one stopped, a large one begins again when
    it has run out, in another order. So no sample of a data set comes twice before each has come once.
    """

    def __init__(
        self, data_sets: Sequence[np.ndarray], counts: Sequence[int], *, seed: int, shuffle: bool
    ) -> None:
        self._data_sets = data_sets
        self._counts = tuple(counts)
        self._seed = seed
        self.shuffled = shuffle
        # Draw j of n stands at (j + 1/2) / n of the epoch: shares hold in every stretch of it.
        times = np.concatenate([(np.arange(n) + 0.5) / n for n in self._counts])
        self._places = np.argsort(np.argsort(times, kind="stable"), kind="stable")
        self._kept: tuple[int, np.ndarray] | None = None

    def size(self, epoch: int) -> int:
        return sum(self._counts)

    def units(self, epoch: int, begin: int, end: int) -> Units:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._epoch(epoch))
        return Units.singles(self._kept[1][begin:end].copy())

    def _epoch(self, epoch: int) -> np.ndarray:
        order = np.empty(sum(self._counts), np.int64)
        order[self._places] = np.concatenate(
            [self._draws(number, epoch * count, count) for number, count in enumerate(self._counts)]
        )
        return order

    def _draws(self, number: int, first: int, count: int) -> np.ndarray:
        """Draws ``first`` to ``first + count`` of a data set's endless sequence of passes."""
        samples = self._data_sets[number]
        pieces = []
        while count > 0:
            turn, place = divmod(first, len(samples))
            taken = min(count, len(samples) - place)
            if self.shuffled:
                numbers = epoch_order(len(samples), self._seed, turn, stream=number + 1)
                pieces.append(samples[numbers[place : place + taken]])
            else:
                pieces.append(samples[place : place + taken])
            first, count = first + taken, count - taken
        return np.concatenate(pieces)

    def describe(self) -> str:
        shares = "/".join(map(str, self._counts))
        return f"seed {self._seed}, shuffled {self.shuffled}, mixed {shares}"


class PackedOrder:
    """Packs of at most ``capacity`` tokens, cut from windows of ``window`` samples of another order.

    So pack i is a function of (seed, epoch, i): no open pack has to be saved, and epochs pack anew.
    """

    def __init__(self, inner: Order, lengths: np.ndarray, *, capacity: int, window: int) -> None:
        """``lengths`` int [N]: tokens of each sample of the store, each at most ``capacity``."""
        self._inner = inner
        self._lengths = lengths
        self._capacity = capacity
        self._window = window
        self._sizes: dict[int, int] = {}
        self._kept: tuple[int, Units] | None = None

    @property
    def shuffled(self) -> bool:
        return self._inner.shuffled

    def size(self, epoch: int) -> int:
        if epoch not in self._sizes:
            self._sizes[epoch] = len(self._packs(epoch))
        return self._sizes[epoch]

    def units(self, epoch: int, begin: int, end: int) -> Units:
        return self._packs(epoch).part(begin, end)

    def _packs(self, epoch: int) -> Units:
        if self._kept is None or self._kept[0] != epoch:
            samples = self._inner.units(epoch, 0, self._inner.size(epoch)).indices
            packs: list[np.ndarray] = []
            for begin in range(0, len(samples), self._window):
                window = samples[begin : begin + self._window]
                packs += [window[pack] for pack in best_fit(self._lengths[window], self._capacity)]
            self._kept = (epoch, Units.packs(packs))
        return self._kept[1]

    def describe(self) -> str:
        return f"{self._inner.describe()}, packs of {self._capacity} tokens from {self._window} samples"
