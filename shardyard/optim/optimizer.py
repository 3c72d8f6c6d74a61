"""The optimizer that a run's settings ask for, over sharded parameters."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardyard.config import TrainingConfig
from shardyard.optim.algorithms import Setup, algorithm_of, builder_of
from shardyard.optim.groups import group_parameters
from shardyard.parallel import Meshes


def build_optimizer(
    model: nn.Module, training: TrainingConfig, meshes: Meshes | None = None
) -> torch.optim.Optimizer:
    """The one of ``training.optimizer`` for all trained parameters, in groups. Every rank calls it.

    The learning rate is set before each step by the schedule.

    Raises:
        UserError: a pattern of ``training.parameter_groups`` matches nothing.
    """
    if gathered := [n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]:
        raise RuntimeError(
            f"parameters are gathered while the optimizer is built, it would never see them: {gathered}"
        )
    build = builder_of(algorithm_of(training))
    return build(group_parameters(model, training), Setup(training, model, meshes))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group the schedule's rate times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
