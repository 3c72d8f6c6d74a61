"""What is left to sum after the last backward pass, once per step.

FSDP has summed each gradient over the ranks that shard its parameter. A parameter that tensor parallelism
leaves whole has a partial gradient on each tp rank (of its slice of the sequence, or of its heads); a weight
that is tied across the pipeline has one on each of the two stages. Summed here, and not in hooks of the
backward pass, no accumulation can count a part twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local, on_every_tp_rank

Tied = Sequence[tuple[torch.nn.Parameter, dist.ProcessGroup]]
"""Parameters of this rank that another pipeline stage holds too, with the group of the two."""


class GradientSums:
    """Call after the backward passes of a step; the gradients are then those of the global batch."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], meshes: Meshes, tied: Tied = ()) -> None:
        whole = [p for p in parameters if p.requires_grad and on_every_tp_rank(p, meshes)]
        self._sums: list[tuple[dist.ProcessGroup, list[torch.nn.Parameter]]] = []
        if whole:
            self._sums.append((meshes.tp.get_group(), whole))
        self._sums += [(group, [parameter]) for parameter, group in tied if parameter.requires_grad]
        self.summed = frozenset(parameter for _, parameters in self._sums for parameter in parameters)
        """Those whose gradients are incomplete before the call."""

    @torch.no_grad()
    def __call__(self) -> None:
        for group, parameters in self._sums:
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            for bucket in _by_kind(gradients):
                _sum_together(bucket, group)


def _by_kind(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds.values()


def _sum_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce several tensors as one: they are small, and a collective's cost is its start."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
