"""Recompute: activations inside a module are dropped and computed again in the backward pass."""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from shardyard.config import ParallelConfig
from shardyard.parallel.blocks import select_blocks


def apply_recompute(model: nn.Module, parallel: ParallelConfig) -> None:
    """Drop the activations inside each matched module and compute them again in the backward pass."""
    if not parallel.recompute:
        return
    for _, module in select_blocks(model, parallel, "recompute_modules"):
        # On the instance, under the module's call: FSDP's hooks stay outside, and no parameter changes its
        # name.
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
