"""Which rank trains which units of a global batch, and in which micro-batches.

Legend: G units of a global batch (samples, or packs of them), R data-parallel ranks, M micro-batches of each
rank, n tokens of a document.

Which units a global batch holds is the sampler's business, so its loss and gradient are the same however it
is cut. Each rank cuts the whole batch, from lengths alone, and so knows its share without a collective; all
arithmetic is in integers, so that no two ranks round differently.

Ranks wait for each other in every forward and backward. They are balanced by *cost*: a document of n tokens
costs n * (even_at + n), its attention as much as all else where n is ``even_at``. A rank's micro-batches are
balanced by *tokens*, which memory and a pipeline's padding go by, and ordered by cost, the largest first, so
that those of all ranks that run at the same time are alike.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.config import TrainingConfig
from shardyard.data.order import Units
from shardyard.data.packing import best_fit
from shardyard.data.sampler import Unit, split_over_ranks

logger = logging.getLogger("shardyard.data")

EVEN_AT_HIDDEN_SIZES = 12
"""``even_at`` in hidden sizes H of the model: a layer of 12 H^2 weights (4 H^2 in attention, 8 H^2 in its
mlp) makes 24 H^2 n operations in a forward, causal attention over n tokens 2 H n^2.
"""


@dataclass(frozen=True)
class Cut:
    """How global batches are cut.

    By default into micro-batches of ``rows`` units in training order. ``by_length`` keeps these numbers and
    chooses which unit goes where by its length; ``max_tokens`` takes as few micro-batches as hold at most so
    many tokens each, whatever their numbers of units. A unit of more tokens has a micro-batch of its own.
    """

    rows: int
    max_tokens: int | None = None
    by_length: bool = False
    even_at: int = 2**20
    at_least: int = 1
    """With ``max_tokens``: micro-batches that a rank makes where it has units enough, for a pipeline."""
    alone: bool = False
    """Each document has a forward of its own, so memory depends on no micro-batch."""

    @classmethod
    def of(cls, training: TrainingConfig, *, hidden_size: int, pp: int = 1, alone: bool = False) -> Cut:
        """As the settings say, for a model of this hidden size in a pipeline of ``pp`` ranks."""
        return cls(
            training.per_device_train_batch_size,
            max_tokens=training.max_tokens_per_micro_batch,
            by_length=training.group_by_length is not False,
            even_at=EVEN_AT_HIDDEN_SIZES * hidden_size,
            at_least=pp,
            alone=alone,
        )

    def share(
        self, units: Units, doc_lens: Callable[[Unit], Sequence[int]], *, dp_rank: int, dp_size: int
    ) -> list[list[Unit]]:
        """This rank's micro-batches; an empty one becomes a filler. ``doc_lens``: the documents of a unit."""
        if self.max_tokens is None and not self.by_length:
            return split_over_ranks(units, dp_rank=dp_rank, dp_size=dp_size, per_device=self.rows)
        every = [units[number] for number in range(len(units))]
        shares = self.micro_batches([doc_lens(unit) for unit in every], dp_size)
        return [[every[number] for number in micro_batch] for micro_batch in shares[dp_rank]]

    def micro_batches(self, documents: Sequence[Sequence[int]], ranks: int) -> list[list[list[int]]]:
        """[R][M] lists of units, by number, for ``documents``: the documents' lengths of each unit."""
        tokens = [sum(lengths) for lengths in documents]
        costs = [sum(n * (self.even_at + n) for n in lengths) for lengths in documents]
        by_tokens = self.max_tokens is not None and not self.alone
        everything = list(range(len(tokens)))
        shares = (_least_loaded if by_tokens else _dealt)(everything, costs, ranks)
        if self.alone:
            return self._one_after_the_other(shares, costs)
        if self.max_tokens is None:
            count = -(-max(map(len, shares)) // self.rows)
            cut = [_dealt(share, tokens, count) for share in shares]
        else:
            filled = [_filled(share, tokens, self.max_tokens) for share in shares]
            count = max(*map(len, filled), min(self.at_least, max(map(len, shares))))
            cut = [
                _even(share, tokens, count, self.max_tokens) or fewest + [[]] * (count - len(fewest))
                for share, fewest in zip(shares, filled, strict=True)
            ]
        return [
            sorted(map(sorted, pieces), key=lambda piece: -sum(costs[unit] for unit in piece))
            for pieces in cut
        ]

    def _one_after_the_other(self, shares: list[list[int]], costs: Sequence[int]) -> list[list[list[int]]]:
        """Units by falling cost: the forwards that ranks make at the same time are of documents alike."""
        rows = self.rows if self.max_tokens is None else 1
        longest = max(map(len, shares))
        ordered = [sorted(share, key=lambda unit: (-costs[unit], unit)) for share in shares]
        return [[share[begin : begin + rows] for begin in range(0, longest, rows)] for share in ordered]


def doc_lens_of(samples: Any, index: int) -> Sequence[int]:
    """The lengths of a sample's documents, without reading its tokens where ``samples`` know them."""
    known = getattr(samples, "doc_lens", None)
    return known(index) if known is not None else samples[index].doc_lens


def tell_of_long_units(longest: int, max_tokens: int | None) -> None:
    """Say once that a unit of ``longest`` tokens is more than a micro-batch is to have; nothing if not."""
    if max_tokens is not None and longest > max_tokens:
        logger.warning(
            "training.max_tokens_per_micro_batch: %d, but a sample or pack may have %d tokens: one that is "
            "longer has a micro-batch of its own",
            max_tokens, longest,
        )  # fmt: skip


def _least_loaded(units: Sequence[int], weights: Sequence[int], bins: int) -> list[list[int]]:
    """The heaviest unit first, each into the bin with the least weight (Graham 1969, LPT): no bin is heavier
    than the mean and one unit more.
    """
    loads = [(0, number) for number in range(bins)]
    parts: list[list[int]] = [[] for _ in range(bins)]
    for unit in _falling(units, weights):
        load, number = loads[0]
        parts[number].append(unit)
        heapq.heapreplace(loads, (load + weights[unit], number))
    return parts


def _dealt(units: Sequence[int], weights: Sequence[int], bins: int) -> list[list[int]]:
    """Equally many for each bin, or one less: rounds of one unit for each, the heavier the lighter its bin.

    Weights of bins differ by the largest difference inside a round at most.
    """
    order = _falling(units, weights)
    loads = [0] * bins
    parts: list[list[int]] = [[] for _ in range(bins)]
    for begin in range(0, len(order), bins):
        waiting = sorted(range(bins), key=lambda number: (loads[number], number))
        for number, unit in zip(waiting, order[begin : begin + bins], strict=False):
            parts[number].append(unit)
            loads[number] += weights[unit]
    return parts


def _filled(units: Sequence[int], tokens: Sequence[int], capacity: int) -> list[list[int]]:
    """Few bins of at most ``capacity`` tokens (best fit, falling); a longer unit has one of its own."""
    fitting = [unit for unit in units if tokens[unit] <= capacity]
    packs = best_fit([tokens[unit] for unit in fitting], capacity)
    alone = [[unit] for unit in units if tokens[unit] > capacity]
    return [*alone, *([fitting[place] for place in pack.tolist()] for pack in packs)]


def _even(units: Sequence[int], tokens: Sequence[int], bins: int, capacity: int) -> list[list[int]] | None:
    """``bins`` bins with about the same number of tokens, as `_filled` says; None if this way finds none."""
    parts = _least_loaded(units, tokens, bins)
    fits = all(len(part) < 2 or sum(tokens[unit] for unit in part) <= capacity for part in parts)
    return parts if fits else None


def _falling(units: Sequence[int], weights: Sequence[int]) -> list[int]:
    return sorted(units, key=lambda unit: (-weights[unit], unit))
