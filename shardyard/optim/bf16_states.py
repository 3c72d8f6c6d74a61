"""AdamW whose two moments are kept in bf16, rounded stochastically: 4 bytes a parameter instead of 8.

Each update is computed in fp32 and moves the weights by what it computed; only what is carried to the next
update is rounded. To the nearest, a second moment would stand still as soon as it changes by less than 1/512
of itself in an update (with beta2 0.999 always, near its mean); with stochastic rounding it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardyard.optim.algorithms import Setup
from shardyard.optim.groups import Group, torch_groups
from shardyard.optim.rounding import Places, draws, key_of, round_into
from shardyard.optim.stepping import Stepping
from shardyard.parallel import local

_PIECE = 2**20
"""Elements that are computed at a time: what is needed in fp32 besides the state is bounded by it."""


def build(groups: Sequence[Group], setup: Setup) -> BF16AdamW:
    training = setup.training
    return BF16AdamW(
        torch_groups(groups, training.lr),
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        seed=training.seed,
    )


class BF16AdamW(Stepping):
    """torch's AdamW (Loshchilov and Hutter 2019) but for the rounding of its moments.

    Args:
        groups: with names (``params`` of (name, parameter)): a parameter's draws follow from its name.
        seed: of the draws. They do not depend on the layout, so neither do the numbers, up to rounding.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._seed = seed
        self._places: dict[torch.Tensor, Places] = {}

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A count of updates and two moments in bf16, all zero."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.bfloat16),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.bfloat16),
        }

    def _step(self) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, group)

    def _update(self, name: str, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(parameter, group)
        state["step"] += 1
        update = int(state["step"])
        if parameter not in self._places:
            self._places[parameter] = Places(parameter)
        places, key = self._places[parameter], key_of(self._seed, update, name)
        assert parameter.grad is not None
        tensors = [_flat(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        for begin in range(0, tensors[0].numel(), _PIECE):
            weights, gradient, mean, square = (tensor[begin : begin + _PIECE] for tensor in tensors)
            at = places.of(begin, begin + len(weights), weights.device)
            _update_piece(weights, gradient, mean, square, draws(at, key), update, group)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part in the order of its memory, which is that of `Places`."""
    part = local(tensor.detach())
    if not part.is_contiguous():
        raise RuntimeError(f"a part of shape {tuple(part.shape)} is not contiguous in memory")
    return part.view(-1)


def _update_piece(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    drawn: tuple[torch.Tensor, torch.Tensor],
    update: int,
    group: dict[str, Any],
) -> None:
    """One update of a piece [N]: ``mean`` and ``square`` are the moments in bf16."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    gradient = gradient.float()
    first = mean.float().lerp_(gradient, 1 - beta1)
    second = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    round_into(mean, first, drawn[0])
    round_into(square, second, drawn[1])
    denominator = second.sqrt_().div_(math.sqrt(1 - beta2**update)).add_(group["eps"])
    weights.mul_(1 - lr * group["weight_decay"])
    weights.addcdiv_(first, denominator, value=-lr / (1 - beta1**update))
