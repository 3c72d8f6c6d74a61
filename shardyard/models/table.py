"""The start-up table, read from live tensors: sizes, and dtypes from storage to export."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from shardyard.config.layout import Layout
from shardyard.models.build import BuiltModel
from shardyard.parallel.pipeline import PipelineModel


def startup_table(
    built: BuiltModel, layout: Layout, optimizer: torch.optim.Optimizer, export_dtype: torch.dtype
) -> Iterator[str]:
    """Lines of the table. Bytes are this rank's; the optimizer's are those of its two moments."""
    parameters = list(built.model.parameters())
    staged = isinstance(built.model, PipelineModel)
    total = built.model.whole.num_parameters if staged else sum(p.numel() for p in parameters)
    trainable = [p for p in parameters if p.requires_grad]
    held = sum(_local(p).numel() * p.element_size() for p in parameters)
    grads = sum(_local(p).numel() * p.element_size() for p in trainable)
    yield f"{'parameters':<22}{total:,}"
    here = " of this rank's pipeline stages" if staged else ""
    yield f"{'trainable':<22}{sum(p.numel() for p in trainable):,}{here}"
    sizes = f"{_mib(held)} parameters, {_mib(grads)} gradients, {_mib(2 * grads)} optimizer"
    yield f"{'bytes per rank':<22}{sizes}"
    if layout.dp_replicate > 1:
        spared = total * 4 // layout.world_size
        yield (
            f"{'hybrid sharding':<22}{layout.dp_replicate} replicas cost each rank {_mib(held - spared)} of "
            f"parameters more "
            f"than sharding over all {layout.world_size} ranks"
        )
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    yield f"{'dtype of storage':<22}{dtypes}"
    yield f"{'dtype of compute':<22}{_name(built.precision.compute)}"
    yield f"{'dtype of reduction':<22}{_name(built.precision.reduce)}"
    yield f"{'dtype of optimizer':<22}{dtypes} ({type(optimizer).__name__})"
    yield f"{'dtype of export':<22}{_name(export_dtype)}"


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
