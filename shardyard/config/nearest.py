"""The nearest layouts that fit, for a wish that does not: what a user can paste."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from shardyard.config.layout_rules import RULES, broken
from shardyard.config.layout_wish import Wish

KEYS = {
    "pp": "parallel.pp_size",
    "tp": "parallel.tp_size",
    "fsdp": "parallel.fsdp_size",
    "cp": "parallel.cp_size",
    "ep": "parallel.ep_size",
    "ep_fsdp": "parallel.ep_fsdp_size",
    "stages_per_rank": "parallel.pp_stages_per_rank",
    "layers_per_stage": "parallel.pp_layers_per_stage",
    "micro_batches": "training.gradient_accumulation_steps",
    "shard": "parallel.shard_placement_fn",
    "expert_shard": "parallel.efsdp_shard_placement_fn",
}
"""What a suggestion may change: the field of the wish -> the setting."""
_DERIVED = {
    "fsdp": None,
    "ep_fsdp": 1,
    "stages_per_rank": None,
    "layers_per_stage": None,
    "shard": None,
    "expert_shard": "auto",
}
"""Fields that can go back to the value that fits by itself."""
_SHOWN = 3
_SMALL_WORLD = 128
"""Up to so many ranks every divisor of their number is tried."""
_NEAR = 8
_USUAL = (1, 2, 4, 8, 16, 32, 64)
"""Tried besides the nearest divisors of the number of ranks; with 1 among them there is always a fit."""
_TRIED = 2000  # fits of one number of changes that are compared; more are only found by very large worlds
_UNKNOWN_WORLD = 1024  # largest size that is proposed while nobody has said how many ranks there are


@dataclass(frozen=True)
class Suggestion:
    """Changes to a wish: the fields with their new values."""

    changes: dict[str, Any]
    wish: Wish

    def __str__(self) -> str:
        return " ".join(f"{KEYS[name]}={_word(value)}" for name, value in self.changes.items())


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def nearest(wish: Wish) -> list[Suggestion]:
    """Up to three fits: those with the fewest settings changed, and of these with the smallest ratios.

    The number of ranks stays, and an axis that is 1 stays 1: nobody asked for it. Replicas are proposed only
    where nothing else fits.
    """
    choices = {name: _choices(wish, name) for name in KEYS}
    fits = _fewest_changes(wish, choices)
    if not fits and wish.fsdp is None and wish.world is not None:
        fits = _fewest_changes(wish, choices | {"fsdp": _sizes(wish.world, wish.shared or wish.world)})
    return fits


def _fewest_changes(wish: Wish, choices: dict[str, list[Any]]) -> list[Suggestion]:
    names = [name for name, values in choices.items() if values]
    for count in range(1, len(names) + 1):
        fits: list[Suggestion] = []
        for chosen in combinations(names, count):
            fits += islice(_fits(wish, chosen, choices), _TRIED)
        if fits:
            distinct: dict[Wish, Suggestion] = {}
            for fit in sorted(fits, key=lambda fit: (_distance(wish, fit), str(fit))):
                # Every larger number of micro-batches may fit as well; the smallest one says enough.
                distinct.setdefault(replace(fit.wish, micro_batches=None), fit)
            return list(distinct.values())[:_SHOWN]
    return []


def _choices(wish: Wish, name: str) -> list[Any]:
    """Other values of a field that are worth a try."""
    value = getattr(wish, name)
    others: list[Any] = []
    if name == "micro_batches":
        if value is not None and wish.pp > 1:
            others = list(range(value + 1, max(wish.stages, value + wish.pp) + 1))
    elif name in _DERIVED and value != _DERIVED[name]:
        others = [_DERIVED[name]]
    if name in ("pp", "tp", "fsdp", "cp", "ep") and value not in (1, None):
        others = [*_sizes(wish.world, value), *others]
    return [other for other in others if other != value]


def _sizes(world: int | None, value: int) -> list[int]:
    if world is None:
        return list(range(1, min(2 * value, _UNKNOWN_WORLD) + 1))
    small = [size for size in range(1, math.isqrt(world) + 1) if world % size == 0]
    divisors = {*small, *(world // size for size in small)}
    if world <= _SMALL_WORLD:
        return sorted(divisors)
    near = sorted(divisors, key=lambda size: (abs(math.log(size / value)), size))[:_NEAR]
    return sorted({*near, *divisors.intersection(_USUAL)})


def _fits(wish: Wish, chosen: tuple[str, ...], choices: dict[str, list[Any]]) -> Iterator[Suggestion]:
    """Every fit that changes all of ``chosen`` and nothing else.

    Values are given one field after the other, and a rule is asked as soon as all that it looks at is known.
    """
    due: list[list[Any]] = []
    for depth in range(len(chosen) + 1):
        open_fields = set(chosen[depth:])
        before = set(chosen[depth - 1 :]) if depth else set(KEYS)
        due.append(
            [
                rule
                for rule in RULES
                if not open_fields.intersection(rule.fields)
                and (depth == 0 or before.intersection(rule.fields))
            ]
        )

    def extend(current: Wish, depth: int) -> Iterator[Suggestion]:
        if not all(rule.holds(current) for rule in due[depth]):
            return
        if depth == len(chosen):
            if next(broken(current), None) is None:
                yield Suggestion({name: getattr(current, name) for name in chosen}, current)
            return
        for value in choices[chosen[depth]]:
            yield from extend(replace(current, **{chosen[depth]: value}), depth + 1)

    return extend(wish, 0)


def _distance(wish: Wish, fit: Suggestion) -> float:
    """Sum of the log ratios of what changed; going back to a derived value counts by what it stands for."""
    total = 0.0
    for name, value in fit.changes.items():
        old = getattr(wish, name)
        if name == "fsdp":
            old, value = wish.shards or 1, fit.wish.shards or 1
        elif name == "ep_fsdp":
            value = fit.wish.expert_shards or 1
        numbers = isinstance(old, int) and isinstance(value, int)
        total += abs(math.log(value / old)) if numbers else math.log(2)
    return total


def nearest_worlds(wish: Wish) -> list[int]:
    """The nearest numbers of ranks, below and above, on which ``wish`` fits as it is."""
    if wish.world is None:
        return []
    model_parallel = wish.pp * wish.tp
    if wish.fsdp is not None:
        steps = [model_parallel * wish.fsdp]
    else:
        steps = [model_parallel * math.lcm(wish.cp, wish.ep // math.gcd(wish.ep, wish.tp))]
        if wish.ep_fsdp > 1:
            steps.append(wish.pp * wish.ep * wish.ep_fsdp)
    found: list[int] = []
    for step in steps:
        middle = wish.world // step
        for counts in (range(middle, max(middle - 8, 0), -1), range(middle + 1, middle + 9)):
            worlds = (count * step for count in counts)
            fits = (world for world in worlds if next(broken(replace(wish, world=world)), None) is None)
            found += islice(fits, 1)
    below = [world for world in found if world < wish.world]
    above = [world for world in found if world > wish.world]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
