"""What a run needs to go on besides weights and optimizer: a few numbers, for any number of ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardyard.train.scaler import ScaleState


@dataclass(frozen=True)
class RunState:
    """``cursor`` is the place in the data: samples passed since the run began, over all epochs and ranks.

    ``data_order`` names the sequence that the cursor counts in: samples, seed and shuffling.
    """

    data_order: str
    step: int = 0
    cursor: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    evaluated_step: int = -1
    """The step of the last validation; -1 before the first."""
    best_loss: float | None = None
    """The lowest validation loss so far, over all sets, and its step; None before there is one."""
    best_step: int | None = None
    bad_evaluations: int = 0
    """Validations in a row since the best one."""
    loss_scale: float | None = None
    """With fp16 compute, the scale after the last step; None before the first and in other precisions."""
    good_steps: int = 0
    """Steps without an overflow since that scale last changed."""
    overflows: int = 0
    """Steps of the run that were skipped because gradients overflowed fp16."""

    def after(self, *, cursor: int, samples: int, tokens: int) -> RunState:
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
        )

    @property
    def scale(self) -> ScaleState | None:
        """Of fp16's loss; None where there is none yet."""
        if self.loss_scale is None:
            return None
        return ScaleState(self.loss_scale, self.good_steps, self.overflows)

    def scaled(self, scale: ScaleState | None) -> RunState:
        """With None, of a precision other than fp16, which may have been the checkpoint's."""
        if scale is None:
            return replace(self, loss_scale=None, good_steps=0)
        return replace(self, loss_scale=scale.scale, good_steps=scale.good_steps, overflows=scale.overflows)

    def judged(self, loss: float, *, min_delta: float) -> RunState:
        """After a validation with total ``loss``: it is the best when the lowest fell by more than
        ``min_delta``. NaN and infinity never improve on anything.
        """
        before = math.inf if self.best_loss is None else self.best_loss
        if math.isfinite(loss) and loss < before - min_delta:
            return replace(
                self, evaluated_step=self.step, best_loss=loss, best_step=self.step, bad_evaluations=0
            )
        return replace(self, evaluated_step=self.step, bad_evaluations=self.bad_evaluations + 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """A checkpoint written before a field existed has its default."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
