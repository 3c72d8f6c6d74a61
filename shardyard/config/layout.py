"""How the ranks of a run are arranged: the sizes of its meshes, computed without torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.config.sections.parallel import ParallelConfig
from shardyard.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh dimensions.

    Dense parameters: ``world_size = pp x dp_replicate x fsdp x tp``; ``cp`` divides ``fsdp``, for the ranks
    that share a sequence share the parameters too. Experts: ``ep x ep_fsdp`` ranks share them; 1 x 1 means
    that they are sharded as every other parameter is.
    """

    world_size: int
    pp: int
    dp_replicate: int
    fsdp: int
    cp: int
    tp: int
    ep: int
    ep_fsdp: int

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples: replicas and shards, less those that share a sequence."""
        return self.dp_replicate * self.fsdp // self.cp


def resolve_layout(parallel: ParallelConfig, world_size: int, pp: int = 1) -> Layout:
    """The layout of ``parallel`` on ``world_size`` ranks; ``pp`` is the number of pipeline stages.

    Raises:
        UserError: the sizes do not fit; the message has both numbers and the nearest sizes that do.
    """
    if world_size < 1:
        raise UserError(f"the number of ranks must be at least 1, not {world_size}")
    tp, cp = parallel.tp_size, parallel.cp_size
    if world_size % (pp * tp):
        near = _nearest_multiples(pp * tp, world_size)
        raise UserError(
            f"parallel.tp_size: {tp} (x {pp} pipeline stages) does not divide the {world_size} ranks; "
            f"{_nearest_divisors(world_size // pp, tp)}, or start {near} ranks"
        )
    shared = world_size // (pp * tp)
    whole = f"{shared} ranks (world size {world_size} / (pp {pp} x tp {tp}))"
    fsdp = shared if parallel.fsdp_size is None else parallel.fsdp_size
    if fsdp > shared:
        raise UserError(
            f"parallel.fsdp_size: {fsdp} is more than the {whole}; "
            f"leave it out to use all, or start {fsdp * pp * tp} ranks"
        )
    if shared % fsdp:
        raise UserError(
            f"parallel.fsdp_size: {fsdp} does not divide the {whole}; {_nearest_divisors(shared, fsdp)}"
        )
    if fsdp % cp:
        raise UserError(
            f"parallel.cp_size: {cp} does not divide parallel.fsdp_size {fsdp}, which includes it; "
            f"{_nearest_divisors(fsdp, cp)}"
        )
    experts = parallel.ep_size * parallel.ep_fsdp_size
    stage = world_size // pp
    if stage % experts:
        raise UserError(
            f"parallel.ep_size x parallel.ep_fsdp_size: {parallel.ep_size} x {parallel.ep_fsdp_size} = "
            f"{experts} does not divide the {stage} ranks; {_nearest_divisors(stage, experts)}"
        )
    return Layout(
        world_size=world_size,
        pp=pp,
        dp_replicate=shared // fsdp,
        fsdp=fsdp,
        cp=cp,
        tp=tp,
        ep=parallel.ep_size,
        ep_fsdp=parallel.ep_fsdp_size,
    )


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    near = [
        max((d for d in divisors if d < wanted), default=None),
        min((d for d in divisors if d > wanted), default=None),
    ]
    return f"nearest sizes that do: {' and '.join(str(size) for size in near if size is not None)}"


def _nearest_multiples(size: int, number: int) -> str:
    below, above = number // size * size, (number // size + 1) * size
    return f"{below} or {above}" if below else str(above)
