"""Megatron's blend of several data sets: the next sample is of the set that is furthest behind its share.

Source: ``build_blending_indices`` and ``build_exhaustive_blending_indices`` in
``megatron/core/datasets/helpers.cpp`` of megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def blend_by_weight(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """``size`` samples of sets whose ``weights`` add up to 1.

    Returns the set of each sample, int16 [size], and its number within that set, int64 [size]. Of several
    sets equally far behind the first is taken. Products are rounded before they are subtracted from, as they
    are in Megatron on x86, for the very same choice where two are close.

    Each choice needs all before it, so this is a loop: 2 us a sample, for any number of sets.
    """
    return _furthest_behind(np.array(weights, np.float64), size, limits=None)


def blend_exhaustively(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """All samples of all sets, each set evenly over the whole; returns the same as ``blend_by_weight``."""
    limits = np.array(sizes, np.int64)
    total = int(limits.sum())
    return _furthest_behind(limits / float(total), total, limits=limits)


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    array = np.array(weights, np.float64)
    return (array / array.sum()).tolist()


def _furthest_behind(
    weights: np.ndarray, size: int, *, limits: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.zeros(size, np.int16)
    numbers = np.zeros(size, np.int64)
    counts = [0] * len(weights)
    last = [-1] * len(weights) if limits is None else limits.tolist()
    taken = np.where(np.array(last) == 0, np.inf, 0.0)
    """Samples taken from each set; infinity once a set has no more, so that it is never behind."""
    behind = np.empty(len(weights))
    for sample in range(size):
        np.multiply(weights, sample or 1, behind)  # the first sample is chosen as the second is
        np.subtract(behind, taken, behind)
        index = int(behind.argmax())
        chosen[sample] = index
        numbers[sample] = counts[index]
        counts[index] += 1
        taken[index] = counts[index] if counts[index] != last[index] else np.inf
    return chosen, numbers
