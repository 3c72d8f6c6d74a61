"""The learning rate of each update, in closed form.

A schedule has no state: update k of a run has the same learning rate whether the run was interrupted or not,
and on any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardyard.config import TrainingConfig

Kind = Literal["cosine", "linear", "constant", "wsd", "cosine_with_restarts", "inverse_sqrt", "polynomial"]
Style = Literal["linear", "cosine", "minus_sqrt", "exponential"]

_OTHER_NAMES: dict[str, Kind] = {
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}
_WITHOUT_WARMUP = 10_000
"""Updates in which inverse_sqrt falls to sqrt(1/2) where no warm-up gives its scale, as in transformers."""


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a course between ``lr`` and ``min_lr``. Updates count from 1 to ``total``."""

    kind: Kind
    lr: float
    min_lr: float
    warmup: int
    total: int
    decay: int = 0
    """Updates at the end in which wsd falls."""
    style: Style = "linear"
    """How it does."""
    cycles: int = 1
    """Of cosine_with_restarts."""
    power: float = 1.0
    """Of polynomial."""

    @classmethod
    def of(cls, training: TrainingConfig, total: int) -> Schedule:
        """``warmup_steps`` wins over ``warmup_ratio``, whose share of the updates is rounded down, as is that
        of ``lr_wsd_decay_ratio``, but to 1 at least.
        """
        warmup = training.warmup_steps
        if warmup is None:
            warmup = _part(total, training.warmup_ratio)
        kind = _OTHER_NAMES.get(training.lr_scheduler_type, training.lr_scheduler_type)
        return cls(
            kind, training.lr, min(training.min_lr, training.lr), warmup, total,  # type: ignore[arg-type]
            decay=max(_part(total, training.lr_wsd_decay_ratio), 1), style=training.lr_wsd_decay_style,
            cycles=training.lr_num_cycles, power=training.lr_power,
        )  # fmt: skip

    def lr_at(self, update: int) -> float:
        """Update k of W warm-up updates: lr k/W. Then p goes from 0 at the last full-rate update to 1 at the
        last update, and the rate is min_lr + (lr - min_lr) f(p):

        - cosine (1 + cos(pi p))/2, linear 1 - p, polynomial (1 - p)^power, constant 1;
        - cosine_with_restarts (1 + cos(pi q))/2, q being the part of its cycle that is over, 1 at the end;
        - wsd 1, and over the last ``decay`` updates, q going from 0 to 1, by ``style``: linear 1 - q, cosine
          (1 + cos(pi q))/2, minus_sqrt 1 - sqrt(q) (Hägele et al., arXiv:2405.18392), exponential
          2^(1 - q) - 1;
        - inverse_sqrt: the rate is lr sqrt(W/k), and min_lr at least.
        """
        if update <= self.warmup:
            return self.lr * update / self.warmup
        # Without a warm-up the first update has the full rate, as if W were 1.
        start = max(self.warmup, 1)
        if self.kind == "constant":
            return self.lr
        if self.kind == "inverse_sqrt":
            scale = self.warmup or _WITHOUT_WARMUP
            return max(self.lr * math.sqrt(scale / (scale + update - start)), self.min_lr)
        progress = _share(update - start, self.total - start)
        height = self._height(progress, update, start)
        return self.lr if height == 1.0 else self.min_lr + (self.lr - self.min_lr) * height

    def _height(self, progress: float, update: int, start: int) -> float:
        match self.kind:
            case "linear":
                return 1.0 - progress
            case "polynomial":
                return (1.0 - progress) ** self.power
            case "wsd":
                decay = min(self.decay, self.total - start)
                return _fall(self.style, _share(update - (self.total - decay), decay))
            case "cosine_with_restarts":
                # In whole numbers: a cycle that begins must not be one that ends, a rounding before it.
                done, of = self.cycles * (update - start), max(self.total - start, 1)
                return _fall("cosine", done % of / of if progress < 1.0 else 1.0)
            case _:
                return _fall("cosine", progress)


def _part(total: int, ratio: float) -> int:
    """``ratio`` of ``total``, rounded down; 0.29 of 100 is 29, though their product is 28.999999999999996."""
    return int(total * ratio * (1 + 1e-12))


def _share(done: int, of: int) -> float:
    """``done`` / ``of`` within [0, 1]; 0 where there is nothing to go."""
    return min(max(done / of, 0.0), 1.0) if of > 0 else 0.0


def _fall(style: Style, q: float) -> float:
    match style:
        case "linear":
            return 1.0 - q
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * q))
        case "minus_sqrt":
            return 1.0 - math.sqrt(q)
        case _:
            return 2.0 ** (1.0 - q) - 1.0
