"""What ranks send each other in one step: every collective, with the mesh dimension it runs over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
_SILENT = {"wait_tensor", "barrier", "monitor_barrier_"}


@dataclass(frozen=True)
class Message:
    kind: str
    axis: str
    """The name of the mesh dimension; "?" for a group that is none of them."""
    elements: int
    """Of the largest tensor taking part: what is gathered, or what is reduced, before or after."""
    dtype: str


class Traffic(TorchDispatchMode):
    """Notes every c10d operation of the calling thread, those of the backward pass included."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        """``axes``: name of a process group -> mesh dimension; see `axes_of`."""
        super().__init__()
        self._axes = axes
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._note(name.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        if name in _SILENT:
            return
        if name not in _KINDS:
            raise AssertionError(f"the counter does not know the operation {name}")
        tensors = list(_tensors(args))
        largest = max(tensors, key=torch.Tensor.numel)
        group = next((found for arg in args if (found := _group_name(arg))), "?")
        axis = self._axes.get(group, "?")
        self.messages.append(Message(_KINDS[name], axis, largest.numel(), str(largest.dtype)))

    def counts(self, *, control: bool = False) -> Counter[tuple[str, str]]:
        """(kind, axis) -> how many. Control messages, the host's fp64 numbers, only if asked for."""
        return Counter((m.kind, m.axis) for m in self.messages if (m.dtype == "torch.float64") == control)

    def elements(self, kind: str, axis: str) -> list[int]:
        """The sizes of these messages, in their order."""
        return [m.elements for m in self.messages if (m.kind, m.axis) == (kind, axis)]


def axes_of(meshes: Any) -> dict[str, str]:
    """Group name -> mesh dimension. One group may serve two dimensions of one name in different views."""
    found: dict[str, str] = {}
    for mesh in (meshes.replicate, meshes.sequence, meshes.expert, meshes.dense):
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(dim) > 1:
                found[mesh.get_group(dim).group_name] = name
    return found


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _group_name(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value).group_name
    return None
