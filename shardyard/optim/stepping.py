"""What the optimizers written here have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class Stepping(torch.optim.Optimizer):
    """Its `_step` is a step; `first_state` says what state a parameter begins with (see ``algorithms``)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``closure`` is refused: a step here is made once the gradients are there."""
        if closure is not None:
            raise ValueError("a step takes no closure")
        self._step()

    def _step(self) -> None:
        raise NotImplementedError

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def state_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of ``parameter``, made now if it has none."""
        state = self.state[parameter]
        if not state:
            state.update(self.first_state(parameter, group))
        return state

    def trained(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters that have a gradient, each with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group
