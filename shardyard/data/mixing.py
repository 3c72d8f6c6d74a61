"""How the data sets of a run are joined: in which shares, in what order, packed or not, without what is held
out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from shardyard.config import Config
from shardyard.config.data_rules import probabilities
from shardyard.data.eval_sets import CountedSamples
from shardyard.data.order import EpochOrder, MixedOrder, Order, PackedOrder, epoch_order
from shardyard.data.parts import JoinedSamples, Part
from shardyard.data.store import SampleStore
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")

_VALIDATION_STREAM = 0x76616C
"""Keeps the draw of ``data.val_size`` apart from the order of training ("val" in ASCII)."""


def packs(config: Config) -> bool:
    """Whether samples are joined to packs (windows of a token stream, and packed files, are full already)."""
    data = config.data
    return (data.packing or data.neat_packing) and data.data_manager_type == "lf"


def order_of_run(config: Config, parts: Sequence[Part], joined: JoinedSamples, kept_out: np.ndarray) -> Order:
    """The order of the parts' samples without those of ``kept_out`` (ascending numbers)."""
    seed, shuffle = config.training.seed, not config.training.disable_shuffling
    data_sets = [np.setdiff1d(joined.numbers(n), kept_out, assume_unique=True) for n in range(len(parts))]
    shares = _shares(config, parts)
    order: Order
    if shares is not None:
        for part, numbers in zip(parts, data_sets, strict=True):
            if not len(numbers):
                raise UserError(
                    f"data.val_size: {config.data.val_size} leaves nothing of {part.name} to train on, which "
                    "data.mix_strategy gives a share; make it smaller, or name data.eval_dataset"
                )
        counts = _counts(config, [len(numbers) for numbers in data_sets], shares)
        for part, numbers, count in zip(parts, data_sets, counts, strict=True):
            logger.info("data: an epoch takes %d samples of %s (%d samples)", count, part.name, len(numbers))
        order = MixedOrder(data_sets, counts, seed=seed, shuffle=shuffle)
    elif len(kept_out):
        order = EpochOrder(np.concatenate(data_sets), seed=seed, shuffle=shuffle)
    else:
        order = EpochOrder(len(joined), seed=seed, shuffle=shuffle)
    if packs(config):
        data = config.data
        packed = PackedOrder(
            order, joined.lengths, capacity=data.cutoff_len, window=data.preprocessing_batch_size
        )
        samples, units = order.size(0), packed.size(0)
        filled = float(joined.lengths[order.units(0, 0, samples).indices].sum()) / (units * data.cutoff_len)
        logger.info(
            "data: %d samples make %d packs of at most %d tokens, %.1f %% full",
            samples, units, data.cutoff_len, 100 * filled,
        )  # fmt: skip
        return packed
    return order


def _shares(config: Config, parts: Sequence[Part]) -> list[float] | None:
    """The share of each data set in an epoch; None takes each sample of each once."""
    weights = [part.weight for part in parts]
    data = config.data
    if all(weight is not None for weight in weights):
        if data.mix_strategy != "concat":
            raise UserError(
                "data.mix_strategy: data.dataset gives shares of its own (0.3, first, 0.7, second); leave "
                "one out"
            )
        return [float(weight) for weight in weights if weight is not None]
    if data.mix_strategy == "concat":
        return None
    given = data.interleave_probs
    shares = [1 / len(parts)] * len(parts) if given is None else list(probabilities(given))
    if len(shares) != len(parts):
        raise UserError(
            f"data.interleave_probs: {len(shares)} shares for the {len(parts)} data sets of data.dataset; "
            "give one for each"
        )
    return shares if len(parts) > 1 else None


def _counts(config: Config, sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Samples of each data set in one epoch.

    interleave_under ends when the first data set has come whole, interleave_over when the last has; shares of
    their own in ``data.dataset`` make an epoch as long as all data sets together.
    """
    strategy = config.data.mix_strategy
    if strategy == "concat":
        total = float(sum(sizes))
    else:
        choose = min if strategy == "interleave_under" else max
        total = choose(size / share for size, share in zip(sizes, shares, strict=True))
    return [max(1, int(share * total + 0.5)) for share in shares]


def kept_for_validation(config: Config, joined: JoinedSamples) -> np.ndarray:
    """The samples that ``data.val_size`` keeps for validation, ascending.

    Whole rows: what one row became, and copies of a row (``num_samples``), are not parted, so that nothing is
    validated that was trained beside it. The last row may bring more samples than were asked for.
    """
    size, num_samples = config.data.val_size, len(joined)
    if not size:
        return np.empty(0, np.int64)
    count = int(size) if size >= 1 else max(1, int(size * num_samples))
    origins = _origins(joined)
    order = epoch_order(int(origins[-1]) + 1, config.training.seed, 0, stream=_VALIDATION_STREAM)
    samples_of = np.bincount(origins)[order]
    taken = int(np.searchsorted(np.cumsum(samples_of), count)) + 1
    kept_out = np.flatnonzero(np.isin(origins, order[:taken]))
    if len(kept_out) >= num_samples:
        raise UserError(
            f"data.val_size: {size} of {num_samples} samples leaves nothing to train on; make it smaller"
        )
    return kept_out


def _origins(joined: JoinedSamples) -> np.ndarray:
    """A number for each sample, int64 [N] ascending: the same for samples of one row and of its copies."""
    begins = [np.empty(0, bool), *(_begins_row(part) for part in joined.parts)]
    return np.cumsum(np.concatenate(begins)) - 1


def _begins_row(part: CountedSamples) -> np.ndarray:
    """Whether a sample is the first of a row that is no copy of the one before: copies stand side by side."""
    if not isinstance(part, SampleStore):
        return np.ones(len(part), bool)
    rows, lengths = part.rows, part.lengths
    begins = np.ones(len(rows), bool)
    begins[1:] = (rows[1:] != rows[:-1]) | (rows[1:] < 0)
    starts = np.flatnonzero(begins)
    same_length = np.flatnonzero(lengths[starts[1:]] == lengths[starts[:-1]])
    for number in same_length.tolist():
        before, after = part[int(starts[number])], part[int(starts[number + 1])]
        if np.array_equal(before.input_ids, after.input_ids) and np.array_equal(before.labels, after.labels):
            begins[starts[number + 1]] = False
    return begins
