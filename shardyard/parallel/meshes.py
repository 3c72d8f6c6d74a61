"""One object that builds the device meshes and answers every question about ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardyard.config.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """Views of the same ranks, the innermost dimension last.

    ``dense`` (pp, dp_replicate, fsdp, tp) for everything but experts; ``expert`` (pp, dp_replicate, efsdp,
    ep) for experts; ``sequence`` (pp, dp_replicate, dp_shard, cp, tp), where fsdp = dp_shard x cp, for who
    reads what; ``replicate``, as ``dense`` with one shard and fsdp times the replicas, for modules that FSDP
    keeps whole.
    """

    layout: Layout
    dense: DeviceMesh
    expert: DeviceMesh
    sequence: DeviceMesh
    replicate: DeviceMesh

    @property
    def fsdp(self) -> DeviceMesh:
        """Where FSDP shards: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.dense["dp_replicate", "fsdp"] if self.layout.dp_replicate > 1 else self.dense["fsdp"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Where FSDP shards what ``ep`` leaves of the experts; 1-D or 2-D as ``fsdp``."""
        return self.expert["dp_replicate", "efsdp"] if self.layout.dp_replicate > 1 else self.expert["efsdp"]

    @property
    def whole(self) -> DeviceMesh:
        """2-D (replicate, shard) mesh of the modules that FSDP keeps whole: one shard, all else replicas.

        The names are those of dense parameters, for so are their gradients: partial on each tp rank.
        """
        return self.replicate["dp_replicate", "fsdp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.expert["ep"]

    @property
    def cp(self) -> DeviceMesh:
        """The ranks that share a sequence, each with its own part of the tokens."""
        return self.sequence["cp"]

    @property
    def pp(self) -> DeviceMesh:
        return self.dense["pp"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """None without tensor parallelism."""
        return self.tp.get_group() if self.layout.tp > 1 else None

    @property
    def dp_size(self) -> int:
        """Groups of ranks that each see another batch."""
        return self.layout.data_parallel

    @property
    def dp_rank(self) -> int:
        replica, shard = (self.sequence.get_local_rank(name) for name in ("dp_replicate", "dp_shard"))
        return replica * (self.layout.fsdp // self.layout.cp) + shard

    @property
    def pp_rank(self) -> int:
        return self.dense.get_local_rank("pp")

    @property
    def tp_rank(self) -> int:
        return self.dense.get_local_rank("tp")

    @property
    def cp_rank(self) -> int:
        return self.sequence.get_local_rank("cp")

    @property
    def leads_batch(self) -> bool:
        """Whether this rank speaks for its batch: one of those that share it, over cp, tp and pp."""
        return self.cp_rank == 0 and self.tp_rank == 0 and self.pp_rank == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss sum counts: cp ranks have a part each, tp ranks all have the same, and
        only the last pipeline stage has one.
        """
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Needs a running process group of ``layout.world_size`` ranks, also when that is one."""
    pp, replicas, fsdp, cp, tp = layout.pp, layout.dp_replicate, layout.fsdp, layout.cp, layout.tp
    views = {
        "dense": ((pp, replicas, fsdp, tp), ("pp", "dp_replicate", "fsdp", "tp")),
        "expert": ((pp, replicas, layout.ep_fsdp, layout.ep), ("pp", "dp_replicate", "efsdp", "ep")),
        "sequence": ((pp, replicas, fsdp // cp, cp, tp), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        "replicate": ((pp, replicas * fsdp, 1, tp), ("pp", "dp_replicate", "fsdp", "tp")),
    }
    meshes = {
        view: init_device_mesh(device_type, shape, mesh_dim_names=names)
        for view, (shape, names) in views.items()
    }
    return Meshes(layout, **meshes)
