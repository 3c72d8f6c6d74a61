"""Which samples a user wants to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from shardyard.data.inspect.view import Source, View, numbers_of
from shardyard.data.order import epoch_order
from shardyard.errors import UserError

_FIRST = 3
"""Samples that are shown when nothing is asked for."""

_DRAW = 0x736565
"""Keeps the draw of random samples apart from what else the seed decides ("see" in ASCII)."""


@dataclass(frozen=True)
class Wanted:
    """Numbers of samples, and how many of each kind; ``pack`` numbers the packs of epoch 0 in training order.

    ``most_trained`` and ``least_trained`` go by the trained share of a sample's tokens. Ties go by number.
    """

    index: tuple[int, ...] = ()
    pack: tuple[int, ...] = ()
    longest: int = 0
    shortest: int = 0
    truncated: int = 0
    most_trained: int = 0
    least_trained: int = 0
    random: int = 0
    source: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether nothing is asked for (``source`` alone restricts the default)."""
        return not any(getattr(self, one.name) for one in fields(self) if one.name != "source")


def select(view: View, wanted: Wanted, *, seed: int) -> list[tuple[str, list[int]]]:
    """(what it is, numbers of samples) for each kind that is asked for, in the order of ``Wanted``.

    Without any the first samples in training order of epoch 0. ``seed`` decides random ones.

    Raises:
        UserError: a number or a data set that is not there, packs where none are made, truncated samples
            where nobody knows which they are.
    """
    numbers = _numbers(view, wanted.source)
    if wanted.is_default:
        return [("the first in training order", _first(view, numbers, restricted=wanted.source is not None))]
    found: list[tuple[str, list[int]]] = []
    if wanted.index:
        found.append(("by number", _by_index(view, wanted.index)))
    found += [(f"pack {number}", _pack(view, number)) for number in wanted.pack]
    ranked: list[tuple[int, str, Callable[[], np.ndarray]]] = [
        (wanted.longest, "longest", lambda: _by(-view.lengths[numbers], numbers)),
        (wanted.shortest, "shortest", lambda: _by(view.lengths[numbers], numbers)),
        (wanted.truncated, "truncated", lambda: _truncated(view, numbers)),
        (wanted.most_trained, "most trained", lambda: _by(-_share(view)[numbers], numbers)),
        (wanted.least_trained, "least trained", lambda: _by(_share(view)[numbers], numbers)),
        (wanted.random, "random", lambda: numbers[epoch_order(len(numbers), seed, 0, stream=_DRAW)]),
    ]
    found += [(what, rank()[:count].tolist()) for count, what, rank in ranked if count]
    return found


def _numbers(view: View, name: str | None) -> np.ndarray:
    if name is None:
        return np.setdiff1d(np.arange(len(view), dtype=np.int64), view.held_out, assume_unique=True)
    chosen = _sources(view, name)
    numbers = numbers_of(view, chosen)
    if not len(numbers):
        raise UserError(
            f"--source {name}: which samples are of which data set is not known here (streaming, or "
            "index_compat); leave it out"
        )
    return numbers


def _sources(view: View, name: str) -> list[Source]:
    exact = [source for source in view.sources if source.name == name]
    found = exact or [source for source in view.sources if name in source.name]
    if not found or (len(found) > 1 and not exact):
        names = ", ".join(source.name for source in view.sources)
        fault = "means several data sets" if found else "is no data set of this run"
        raise UserError(f"--source {name}: {fault}; there are {names}")
    return found


def _first(view: View, numbers: np.ndarray, *, restricted: bool) -> list[int]:
    allowed = set(numbers.tolist()) if restricted else None
    found: list[int] = []
    for unit in range(view.order.size(0)):
        found += [number for number in view.unit(unit) if allowed is None or number in allowed]
        if len(found) >= _FIRST:
            break
    return found[:_FIRST]


def _by_index(view: View, wanted: tuple[int, ...]) -> list[int]:
    for number in wanted:
        if not 0 <= number < len(view):
            part = f" in {view.stretch} (--windows reads more)" if view.stretch else ""
            raise UserError(f"--index {number}: there are samples 0 to {len(view) - 1}{part}")
    return list(wanted)


def _pack(view: View, number: int) -> list[int]:
    if not view.is_packed:
        raise UserError(f"--pack {number}: samples are not packed; set data.packing, or use --index")
    packs = view.order.size(0)
    if not 0 <= number < packs:
        raise UserError(f"--pack {number}: epoch 0 has packs 0 to {packs - 1}")
    return list(view.unit(number))


def _truncated(view: View, numbers: np.ndarray) -> np.ndarray:
    found = view.truncated
    if found is None:
        raise UserError(
            "--truncated: these samples do not say whether they were cut: windows of documents never are, "
            "token files and streams do not keep it"
        )
    return np.intersect1d(found, numbers, assume_unique=True)


def _share(view: View) -> np.ndarray:
    """The trained share of each sample's tokens, float64 [N]."""
    return view.trained / np.maximum(view.lengths, 1)


def _by(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return numbers[np.argsort(keys, kind="stable")]
