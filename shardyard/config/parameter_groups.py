"""``training.parameter_groups``: what an entry may hold, read without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardyard.config.sections.training import TrainingConfig

_PATTERN = re.compile(r"(?:[^{}]|\{(?:\*|\d+-\d+)\})+")
"""As `parallel.patterns` reads it, which needs torch."""
_KEYS = ("patterns", "lr", "lr_scale", "weight_decay")


@dataclass(frozen=True)
class GroupRule:
    """An entry. ``lr_scale``: what the schedule's rate is multiplied by."""

    patterns: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None
    """None: as everywhere, ``training.weight_decay``."""


def group_rules(training: TrainingConfig) -> tuple[GroupRule, ...]:
    """The entries in order.

    Raises:
        ValueError: an entry that is none; the message says which and why.
    """
    entries = training.parameter_groups or ()
    return tuple(_rule(f"entry {number}", entry, training.lr) for number, entry in enumerate(entries, 1))


def _rule(where: str, entry: Mapping[str, Any], lr: float) -> GroupRule:
    if unknown := [key for key in entry if key not in _KEYS]:
        raise ValueError(f"{where} has the key {unknown[0]!r}; an entry has {', '.join(_KEYS)}")
    patterns = entry.get("patterns")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    listed = isinstance(patterns, list | tuple) and all(isinstance(p, str) and p for p in patterns)
    if not patterns or not listed:
        raise ValueError(f"{where} needs patterns: names of parameters, such as model.layers.{{0-3}}.*")
    if bad := [pattern for pattern in patterns if not _PATTERN.fullmatch(pattern)]:
        raise ValueError(f"{where}: in {bad[0]!r} braces hold `*` or a range such as `{{0-3}}`")
    own, scale, decay = (_number(where, entry, key) for key in _KEYS[1:])
    if own is not None and scale is not None:
        raise ValueError(f"{where} has lr and lr_scale; keep one")
    if own is None and scale is None and decay is None:
        raise ValueError(f"{where} changes nothing; give it lr, lr_scale or weight_decay")
    if own is not None:
        if lr == 0:
            raise ValueError(
                f"{where} has lr {own:g} and training.lr is 0, which the schedule scales; raise it"
            )
        scale = own / lr
    return GroupRule(tuple(patterns), 1.0 if scale is None else scale, decay)


def _number(where: str, entry: Mapping[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: {key} {value!r} is not a number from 0 on")
    return float(value)
