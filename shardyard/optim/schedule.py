"""The learning rate of each update, in closed form.

A schedule has no state: update k of a run has the same learning rate whether the run was interrupted or not,
and on
any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardyard.config import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then cosine, linear or constant. Updates count from 1 to ``total``."""

    kind: Literal["cosine", "linear", "constant"]
    lr: float
    min_lr: float
    warmup: int
    total: int

    @classmethod
    def of(cls, training: TrainingConfig, total: int) -> Schedule:
        """``warmup_steps`` wins over ``warmup_ratio``, whose share of the updates is rounded down."""
        warmup = (
            training.warmup_steps if training.warmup_steps is not None else int(total * training.warmup_ratio)
        )
        return cls(training.lr_scheduler_type, training.lr, min(training.min_lr, training.lr), warmup, total)

    def lr_at(self, update: int) -> float:
        """Update k of W warm-up updates: lr k/W. Then p goes from 0 at the last full-rate update to 1 at the
        last update:

        cosine min_lr + (lr - min_lr)(1 + cos(pi p))/2, linear lr + (min_lr - lr) p, constant lr.
        """
        if update <= self.warmup:
            return self.lr * update / self.warmup
        if self.kind == "constant":
            return self.lr
        # Without a warm-up the first update has the full rate, as if W were 1.
        start = max(self.warmup, 1)
        progress = (update - start) / (self.total - start) if self.total > start else 0.0
        progress = min(max(progress, 0.0), 1.0)
        if self.kind == "linear":
            return self.lr + (self.min_lr - self.lr) * progress
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
