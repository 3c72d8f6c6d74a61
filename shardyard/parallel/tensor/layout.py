"""Parameters on the tensor-parallel mesh: making them, and cutting a whole tensor as they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


class Splitter:
    """Replaces a meta model's parameters by their split selves, a tied one once for all its owners."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def split(self, module: nn.Module, name: str, dim: int) -> None:
        parameter = module._parameters.get(name)
        if parameter is None:
            return
        if parameter not in self._done:
            split = distribute_tensor(parameter.data, self._mesh, [Shard(dim)], src_data_rank=None)
            self._done[parameter] = nn.Parameter(split, requires_grad=parameter.requires_grad)
        module._parameters[name] = self._done[parameter]


def local_slice(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of ``whole``, cut as ``like`` is: any mesh, uneven sizes; no collective.

    Raises:
        ValueError: ``like`` has a placement that is neither a shard nor a replica.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    for axis in _in_order_of_cuts(like.placements):
        dim = like.placements[axis].dim % whole.ndim  # pyright: ignore[reportAttributeAccessIssue]
        # torch.chunk's rule, which DTensor and FSDP share: parts of a size rounded up, the last ones short or
        # empty.
        length = whole.shape[dim]
        size = -(-length // like.device_mesh.size(axis))
        start = min(coordinate[axis] * size, length)
        whole = whole.narrow(dim, start, min(size, length - start))
    return whole


def _in_order_of_cuts(placements: Sequence[Placement]) -> list[int]:
    """Mesh dimensions that cut, first cut first.

    A plain shard cuts what outer dimensions left. A strided one is FSDP's, made after those inside it: it
    cuts what they left.
    """
    cuts = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if not all(hasattr(placements[axis], "dim") for axis in cuts):
        raise ValueError(f"{tuple(placements)} includes what holds no slice")
    strided = [axis for axis in cuts if not placements[axis].is_shard()]
    return [axis for axis in cuts if axis not in strided] + strided[::-1]
