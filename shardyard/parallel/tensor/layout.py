"""Parameters on the tensor-parallel mesh."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


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
