"""Filling sequences: which samples share a pack."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_fit(lengths: np.ndarray | Sequence[int], capacity: int) -> list[np.ndarray]:
    """Packs of at most ``capacity`` tokens that together hold each sample once.

    Best-fit decreasing (Johnson 1974; at most 11/9 of the fewest packs possible, plus one): the longest
    sample first, each into the fullest pack that still has room for it. Ties go by position, so the result
    depends on the arguments alone.

    Returns:
        Packs in the order of their first sample; each an int64 array of positions in ``lengths``, ascending.

    Raises:
        ValueError: a sample is longer than ``capacity``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a sample of {int(sizes.max())} tokens does not fit into packs of {capacity}")
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """(tokens that still fit, number of the pack), ascending."""
    for position in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[position])
        place = bisect_left(rooms, (size, 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(position)
        insort(rooms, (room - size, number))
    return sorted((np.array(sorted(pack), np.int64) for pack in packs), key=lambda pack: int(pack[0]))
