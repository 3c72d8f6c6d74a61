"""What a run asks of its ranks, before anyone knows whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.config.model_shape import ModelShape
from shardyard.config.sections.parallel import ParallelConfig


@dataclass(frozen=True)
class Wish:
    """The settings that decide about a layout.

    ``world`` is None when nobody said how many ranks there are, ``shape`` when the model is not on this
    machine, ``micro_batches`` when no step is meant; what depends on them is then not known either.
    """

    world: int | None
    pp: int
    tp: int
    fsdp: int | None
    cp: int
    ep: int
    ep_fsdp: int
    cp_type: str
    schedule: str
    stages_per_rank: int | None
    layers_per_stage: tuple[int, ...] | None
    micro_batches: int | None
    shard: str | None
    expert_shard: str
    shape: ModelShape | None

    @classmethod
    def of(
        cls, parallel: ParallelConfig, world: int | None, shape: ModelShape | None, micro_batches: int | None
    ) -> Wish:
        return cls(
            world=world,
            pp=parallel.pp_size,
            tp=parallel.tp_size,
            fsdp=parallel.fsdp_size,
            cp=parallel.cp_size,
            ep=parallel.ep_size,
            ep_fsdp=parallel.ep_fsdp_size,
            cp_type=parallel.cp_type,
            schedule=parallel.pp_schedule,
            stages_per_rank=parallel.pp_stages_per_rank,
            layers_per_stage=parallel.pp_layers_per_stage,
            micro_batches=micro_batches,
            shard=parallel.shard_placement_fn,
            expert_shard=parallel.efsdp_shard_placement_fn,
            shape=shape,
        )

    @property
    def shared(self) -> int | None:
        """Ranks of one pipeline stage that hold the same slice of each tensor: world / (pp x tp)."""
        if self.world is None or self.world % (self.pp * self.tp):
            return None
        return self.world // (self.pp * self.tp)

    @property
    def shards(self) -> int | None:
        """fsdp_size, or what it stands for."""
        return self.shared if self.fsdp is None else self.fsdp

    @property
    def expert_ranks(self) -> int | None:
        """Ranks that share the experts: fsdp x tp."""
        return None if self.shards is None else self.shards * self.tp

    @property
    def expert_shards(self) -> int | None:
        """ep_fsdp_size, or what it stands for."""
        ranks = self.expert_ranks
        return None if ranks is None or ranks % self.ep else ranks // self.ep

    @property
    def stages_of_rank(self) -> int:
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 2 if self.schedule == "interleaved_1f1b" else 1

    @property
    def stages(self) -> int:
        return self.pp * self.stages_of_rank
