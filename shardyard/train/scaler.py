"""The factor on the loss that keeps fp16 gradients inside fp16's range, as torch.amp.GradScaler moves it.

Small gradients would vanish in fp16 (below 6e-8) and large ones overflow (above 65504). The loss is
multiplied by a scale before the backward pass, and norm and gradients are divided by it before the optimizer
sees them. A step whose gradients overflow is skipped and the scale falls; after enough good steps in a row it
grows. All ranks learn of an overflow with the norm, so their scales are the same without being exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardyard.config import ParallelConfig, TrainingConfig


@dataclass(frozen=True)
class ScaleState:
    """What a run that goes on needs: the scale, steps since it last changed, and steps that overflowed."""

    scale: float
    good_steps: int = 0
    overflows: int = 0


class LossScaler:
    """The dynamic scale of one run."""

    def __init__(
        self,
        initial: float = 65536.0,
        *,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        minimum: float = 1.0,
    ) -> None:
        self.state = ScaleState(initial)
        self._interval, self._minimum = growth_interval, minimum
        self._growth, self._backoff = growth_factor, backoff_factor

    @classmethod
    def of(
        cls, training: TrainingConfig, parallel: ParallelConfig, state: ScaleState | None = None
    ) -> LossScaler | None:
        """The scaler that a run with these settings needs, going on from ``state``; None without fp16."""
        if parallel.param_dtype != "fp16":
            return None
        scaler = cls(
            training.fp16_initial_scale, growth_interval=training.fp16_growth_interval,
            growth_factor=training.fp16_growth_factor, backoff_factor=training.fp16_backoff_factor,
            minimum=training.fp16_min_scale,
        )  # fmt: skip
        scaler.state = state or scaler.state
        return scaler

    @property
    def scale(self) -> float:
        return self.state.scale

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.scale > self._minimum

    def succeeded(self) -> ScaleState:
        """After a step with finite gradients."""
        good, scale = self.state.good_steps + 1, self.scale
        if good >= self._interval:  # a run that goes on may have a shorter one
            grown = _fp32(scale * self._growth)
            good, scale = 0, grown if math.isfinite(grown) else scale
        self.state = ScaleState(scale, good, self.state.overflows)
        return self.state

    def back_off(self) -> str:
        """After a step whose gradients overflowed; what to tell of it."""
        before, lower = self.scale, max(_fp32(self.scale * self._backoff), self._minimum)
        self.state = ScaleState(lower, 0, self.state.overflows + 1)
        return (
            f"gradients overflow fp16 with the loss scaled by {before:g}; the scale is {lower:g} from now on "
            f"({self.state.overflows} such step(s) so far)"
        )


def _fp32(value: float) -> float:
    """As GradScaler keeps it; powers of two are exact in any case."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
