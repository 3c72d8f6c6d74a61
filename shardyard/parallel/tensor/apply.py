"""Tensor parallelism of a model on the meta device, before its weights are read."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local
from shardyard.parallel.tensor.layout import Splitter
from shardyard.parallel.tensor.plan import Region, plan_tensor_parallel
from shardyard.parallel.tensor.regions import (
    own_rows,
    rank_0_only,
    use_parameters,
    wrap_body,
    wrap_embedding,
    wrap_region,
)

logger = logging.getLogger("shardyard.parallel")


def apply_tensor_parallel(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> None:
    """Split the layers of the plan over ``meshes.tp``; nothing without tensor parallelism.

    Afterwards the model's forward takes ids [1, T], T a multiple of tp, and position ids of all T tokens,
    and gives logits [1, L, V/tp] of this rank's words. Between regions a rank has its [1, T/tp, H] tokens.
    Split parameters are DTensors on ``meshes.tp``; each other parameter's gradient is to be summed over tp
    once a step.

    Raises:
        UserError: as `plan_tensor_parallel`.
    """
    if meshes.layout.tp == 1:
        return
    causal_lm: Any = model
    plan = plan_tensor_parallel(causal_lm, parallel)
    splitter = Splitter(meshes.tp)
    for region in plan.regions:
        _apply_region(model, region, splitter, meshes)
    group = meshes.tp.get_group()
    if plan.embedding is not None:
        embedding = model.get_submodule(plan.embedding)
        assert isinstance(embedding, nn.Embedding)
        splitter.split(embedding, "weight", 0)
        use_parameters(embedding, {"weight": local})
        wrap_embedding(embedding, group)
    if plan.head is not None:
        head = model.get_submodule(plan.head)
        _split_by_output(head, splitter, group)
        wrap_body(causal_lm.base_model, group)
    whole = [region.name for region in plan.regions if not region.is_split]
    logger.info(
        "tensor parallelism over %d ranks: %d modules split%s",
        meshes.layout.tp,
        len(plan.regions) - len(whole),
        f", {len(whole)} computed whole by every rank (such as {whole[0]})" if whole else "",
    )


def _apply_region(model: nn.Module, region: Region, splitter: Splitter, meshes: Meshes) -> None:
    group = meshes.tp.get_group()
    module = model.get_submodule(region.name)
    for name in region.colwise:
        _split_by_output(model.get_submodule(name), splitter, group)
    for name in region.rowwise:
        layer = model.get_submodule(name)
        splitter.split(layer, "weight", 1)
        use_parameters(layer, {"weight": local, "bias": rank_0_only(group)})
    if region.per_head:
        use_parameters(module, dict.fromkeys(region.per_head, own_rows(group)))
    wrap_region(module, group, is_split=region.is_split)


def _split_by_output(layer: nn.Module, splitter: Splitter, group: dist.ProcessGroup) -> None:
    splitter.split(layer, "weight", 0)
    use_parameters(layer, {"weight": local, "bias": own_rows(group)})
