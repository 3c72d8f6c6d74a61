"""Which ranks hold the same piece of a parameter, and which of them answers for it.

Every trained parameter is a DTensor. Its placements tell over which of its own mesh dimensions it is
replicated; a parameter that only FSDP shards lies, beyond that, on every tensor-parallel rank of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardyard.parallel.meshes import Meshes

_DENSE_WITHOUT_TP = {"dp_replicate", "fsdp"}


def on_every_tp_rank(tensor: torch.Tensor, meshes: Meshes) -> bool:
    """Whether tensor parallelism left ``tensor`` whole, so that each tp rank holds the same shard of it and
    has, in a backward pass, its own part of the gradient.
    """
    if meshes.layout.tp == 1 or not isinstance(tensor, DTensor):
        return False
    return set(tensor.device_mesh.mesh_dim_names or ()) <= _DENSE_WITHOUT_TP


def replica_groups(tensor: torch.Tensor, meshes: Meshes) -> dict[str, dist.ProcessGroup]:
    """Mesh dimension -> the ranks along it that hold the same piece of ``tensor`` as this rank."""
    if not isinstance(tensor, DTensor):  # a buffer: the same on all ranks of a pipeline stage
        shared = {name: meshes.replicate[name] for name in ("dp_replicate", "tp")}
        return {name: mesh.get_group() for name, mesh in shared.items() if mesh.size() > 1}
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    groups = {
        name: mesh.get_group(dim)
        for dim, (name, placement) in enumerate(zip(names, tensor.placements, strict=True))
        if placement.is_replicate() and mesh.size(dim) > 1
    }
    if on_every_tp_rank(tensor, meshes):
        groups["tp"] = meshes.tp.get_group()
    return groups


def answers_for(tensor: torch.Tensor, meshes: Meshes) -> bool:
    """Whether this rank is the first of those that hold its piece of ``tensor``."""
    return all(dist.get_rank(group) == 0 for group in replica_groups(tensor, meshes).values())


def beside(
    parameter: DTensor,
    part: torch.Tensor,
    *,
    shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """``part``, where it is, as this rank's of a tensor like ``parameter`` but for what is given; DTensor's
    own ``from_local`` moves what is offloaded to the device of the mesh.
    """
    if shape is None:
        size, stride = parameter.shape, parameter.stride()
    else:
        size, stride = torch.Size(shape), torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(size, stride, part.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(placements or parameter.placements), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``; a gradient of the part becomes that of the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
