"""AdamW in its fused form: one pass over each parameter, several times faster than a loop of operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard.optim.algorithms import Setup
from shardyard.optim.groups import Group, torch_groups


def build(groups: Sequence[Group], setup: Setup) -> torch.optim.AdamW:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), as torch has it."""
    training = setup.training
    return torch.optim.AdamW(
        torch_groups(groups, training.lr),
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
