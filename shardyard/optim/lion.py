"""Lion: the sign of a momentum, one state where AdamW has two.

Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675), algorithm 2:

    U = b1 M + (1 - b1) G;   W <- (1 - lr decay) W - lr sign(U);   M <- b2 M + (1 - b2) G

Every element moves by lr, so that rates are 3 to 10 times smaller than AdamW's, and decay as much larger.
Where U is rounding alone, a sign may depend on how sums were split; such an element moves by lr all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard.optim.algorithms import Setup
from shardyard.optim.groups import Group, torch_groups
from shardyard.optim.stepping import Stepping
from shardyard.parallel import local


class Lion(Stepping):
    """Element by element, so that shards need nothing of each other."""

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._betas = betas

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The momentum."""
        return {"exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def _step(self) -> None:
        for parameter, group in self.trained():
            assert parameter.grad is not None
            momentum = self.state_of(parameter, group)["exp_avg"]
            self._update(local(parameter), local(parameter.grad), local(momentum), group)

    def _update(
        self, parameter: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]
    ) -> None:
        beta1, beta2 = self._betas
        sign = momentum.lerp(grad, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(sign, alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)


def build(groups: Sequence[Group], setup: Setup) -> Lion:
    """With the betas of ``training.lion_beta1`` and ``lion_beta2``."""
    training = setup.training
    return Lion(torch_groups(groups, training.lr), (training.lion_beta1, training.lion_beta2))
