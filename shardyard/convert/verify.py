"""Does the result hold the source, bit for bit?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.convert.progress import ByteProgress
from shardyard.convert.weights import Facts, Weights, same_bits, size_of
from shardyard.errors import UserError


@dataclass(frozen=True)
class Verified:
    """What was compared."""

    tensors: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.bytes / 2**20:,.1f} MiB: equal, bit for bit"


def verify(source: Weights, result: Weights, *, left_out: frozenset[str] = frozenset()) -> Verified:
    """Read both, a tensor at a time, and compare names, shapes, dtypes and bits.

    ``source`` is in the dtype that was asked for (`CastWeights`); ``left_out`` are names that the result's
    format has no place for.

    Raises:
        UserError: the first difference.
    """
    wanted = {name: facts for name, facts in source.facts.items() if name not in left_out}
    _compare_facts(source, result, wanted)
    total = sum(map(size_of, wanted.values()))
    with ByteProgress("comparing", total) as progress:
        # In the order in which the result reads best: its tensors may lie joined.
        for name in result.facts:
            if not same_bits(source.read(name), found := result.read(name)):
                raise UserError(f"{result.folder}: {name} differs from {source.folder}")
            progress.advance(found.nbytes)
    return Verified(len(wanted), total)


def _compare_facts(source: Weights, result: Weights, wanted: Mapping[str, Facts]) -> None:
    for names, what in (
        (wanted.keys() - result.facts.keys(), "lacks"),
        (result.facts.keys() - wanted.keys(), "has"),
    ):
        if names:
            raise UserError(
                f"{result.folder} {what} {len(names)} tensors, such as {min(names)}, unlike {source.folder}"
            )
    for name, facts in wanted.items():
        if result.facts[name] != facts:
            (shape, dtype), (found, held) = facts, result.facts[name]
            raise UserError(
                f"{result.folder}: {name} is {list(found)} {held}, in {source.folder} {list(shape)} {dtype}"
            )
