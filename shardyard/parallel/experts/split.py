"""Experts on the ranks that own them: each ep rank holds some, and tokens travel to them and back."""

from __future__ import annotations

import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.parallel.meshes import Meshes


def apply_expert_parallel(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> None:
    """Each parameter of the experts becomes a DTensor Shard(0) on ``meshes.ep``; does nothing with ep 1.

    Before FSDP, on the meta device. ``num_experts`` of an experts module is what its rank holds afterwards.

    Raises:
        UserError: a model without experts, or experts that ``parallel.ep_size`` does not divide.
    """
    raise NotImplementedError
