"""One object that builds the device meshes and answers every question about ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardyard.config.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """The two views of the same ranks.

    ``dense`` (pp, dp_replicate, fsdp, tp) for everything but experts, ``expert`` (pp, dp_replicate, efsdp,
    ep) for
    experts, ``replicate`` (dp, 1) for modules that stay whole on every rank.
    """

    layout: Layout
    dense: DeviceMesh
    expert: DeviceMesh
    replicate: DeviceMesh

    @property
    def fsdp(self) -> DeviceMesh:
        """Where FSDP shards: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.dense["dp_replicate", "fsdp"] if self.layout.dp_replicate > 1 else self.dense["fsdp"]

    @property
    def dp_size(self) -> int:
        """Ranks that each see another batch."""
        return self.layout.data_parallel

    @property
    def dp_rank(self) -> int:
        replica, shard = self.dense.get_local_rank("dp_replicate"), self.dense.get_local_rank("fsdp")
        return replica * self.layout.fsdp + shard


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Needs a running process group of ``layout.world_size`` ranks, also when that is one."""
    dense = init_device_mesh(
        device_type,
        (layout.pp, layout.dp_replicate, layout.fsdp, layout.tp),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    expert = init_device_mesh(
        device_type,
        (layout.pp, layout.dp_replicate, layout.ep_fsdp, layout.ep),
        mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
    )
    replicate = init_device_mesh(device_type, (layout.world_size, 1), mesh_dim_names=("replicate", "whole"))
    return Meshes(layout, dense, expert, replicate)
