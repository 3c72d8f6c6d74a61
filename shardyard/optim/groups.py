"""Which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from shardyard.config import TrainingConfig


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own; the learning rate is the schedule's times ``lr_scale``."""

    label: str
    named: tuple[tuple[str, nn.Parameter], ...]
    weight_decay: float
    lr_scale: float = 1.0

    def options(self, lr: float) -> dict[str, Any]:
        """The group as torch's optimizers take it, with names, at the schedule's rate ``lr``."""
        return {
            "params": list(self.named), "weight_decay": self.weight_decay, "lr": lr * self.lr_scale,
            "lr_scale": self.lr_scale, "label": self.label,
        }  # fmt: skip


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Matrices decay; norms, biases and other vectors do not."""
    return parameter.ndim >= 2 and not name.endswith("bias")  # an expert's stacked biases are 2-D


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], training: TrainingConfig
) -> tuple[Group, ...]:
    """Weight decay leaves out norms and biases unless ``training.decay_norm_and_bias``."""
    named = list(named)
    everything = training.decay_norm_and_bias
    decayed = tuple((name, p) for name, p in named if everything or decays(name, p))
    plain = tuple((name, p) for name, p in named if not (everything or decays(name, p)))
    groups = (Group("decayed", decayed, training.weight_decay), Group("not decayed", plain, 0.0))
    return tuple(group for group in groups if group.named)
