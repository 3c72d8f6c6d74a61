"""Every transformation of the model, in order, in one function.

The model arrives on the meta device, before its weights are read, and leaves with every parameter a DTensor.
"""

from __future__ import annotations

import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.device import Device
from shardyard.parallel.fsdp import apply_fsdp
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.recompute import apply_recompute


def apply_parallelism(
    model: nn.Module, parallel: ParallelConfig, meshes: Meshes, device: Device
) -> nn.Module:
    """Recompute, then FSDP2. TP, EP, CP and compile take their places here when they come.

    Raises:
        UserError: a list of patterns that matches nothing.
    """
    apply_recompute(model, parallel)
    apply_fsdp(model, parallel, meshes, device)
    return model
