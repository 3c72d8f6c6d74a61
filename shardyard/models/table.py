"""The start-up table, read from live tensors: sizes, and dtypes from storage to export."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from shardyard.config import TrainingConfig
from shardyard.device import ProcessGroup
from shardyard.models.build import BuiltModel
from shardyard.parallel import Meshes, local
from shardyard.parallel.pipeline import PipelineModel


def startup_table(
    built: BuiltModel,
    meshes: Meshes,
    group: ProcessGroup,
    export_dtype: torch.dtype,
    training: TrainingConfig,
    *,
    state_bytes: int | None = None,
) -> list[str]:
    """Lines of the table; every rank calls it. Bytes are those of the rank that holds most. ``state_bytes``:
    what the optimizer will keep on this rank; None is AdamW's two moments.
    """
    layout, model = meshes.layout, built.model
    parameters = list(model.parameters())
    held = sum(map(_bytes, parameters))
    trained = sum(_bytes(p) for p in parameters if p.requires_grad)
    grads = 0 if training.optimizer_in_backward else trained
    repeated = sum(_bytes(p) for p in parameters if _is_sharded(p, meshes))
    leads_stage = group.rank % (layout.world_size // layout.pp) == 0
    counted = list(_counted_here(model)) if leads_stage else []
    sizes = [sum(p.numel() for p in counted), sum(p.numel() for p in counted if p.requires_grad)]
    kept = 2 * trained if state_bytes is None else state_bytes
    rows = group.gather([held, grads, kept, repeated, *sizes])
    total, trainable = (int(count) for count in rows[:, 4:].sum(0))
    held, grads, kept, repeated = max(rows[:, :4].long().tolist(), key=lambda row: sum(row[:3]))
    most = "" if bool((rows[:, :3] == rows[0, :3]).all()) else ", on the rank that holds most"
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    of_gradients = "a unit at a time of" if training.optimizer_in_backward else _mib(grads)
    of_state = dtypes if training.optimizer_state_dtype == "fp32" else training.optimizer_state_dtype
    lines = [
        ("parameters", f"{total:,}"),
        ("trainable", f"{trainable:,}"),
        (
            "bytes per rank",
            f"{_mib(held)} parameters, {of_gradients} gradients, {_mib(kept)} optimizer{most}",
        ),
    ]
    if layout.dp_replicate > 1:
        more = repeated - repeated // layout.dp_replicate
        shards = layout.dp_replicate * layout.fsdp
        lines.append(
            (
                "hybrid sharding",
                f"{layout.dp_replicate} replicas cost each rank {_mib(more)} of parameters more than "
                f"sharding over {shards} ranks",
            )
        )
    lines += [
        ("dtype of storage", dtypes),
        ("dtype of compute", _name(built.precision.compute)),
        ("dtype of reduction", _name(built.precision.reduce)),
        ("dtype of optimizer", f"{of_state} ({training.optimizer})"),
        ("dtype of export", _name(export_dtype)),
    ]
    return [f"{name:<22}{value}" for name, value in lines]


def _counted_here(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of this rank's stages; a tied one counts where the first stage is."""
    elsewhere: set[str] = set()
    if isinstance(model, PipelineModel) and not model.holds_first:
        elsewhere = set(model.whole.tied.values())
    return (parameter for name, parameter in model.named_parameters() if name not in elsewhere)


def _is_sharded(parameter: torch.Tensor, meshes: Meshes) -> bool:
    """Whether more shards and fewer replicas would make this rank's part smaller: not so of what stays whole
    (which cannot be told apart where a replica is one rank).
    """
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    replicas = parameter.device_mesh.size(names.index("dp_replicate")) if "dp_replicate" in names else 1
    return replicas == meshes.layout.dp_replicate


def _bytes(parameter: torch.Tensor) -> int:
    part = local(parameter)
    return part.numel() * part.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
