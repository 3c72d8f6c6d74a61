"""Several optimizers that look like one: other parameters, the same schedule, one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard.optim.algorithms import first_state
from shardyard.optim.stepping import Stepping


class Combined(Stepping):
    """Steps ``parts`` one after another. Their groups are its groups, and their state is its state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """That of the part which has ``parameter``."""
        part = next(part for part in self.parts if any(group is own for own in part.param_groups))
        return first_state(part, parameter, group)

    def _step(self) -> None:
        for part in self.parts:
            part.step()
