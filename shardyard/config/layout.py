"""How the ranks of a run are arranged: the sizes of its meshes, computed without torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.config.sections.parallel import ParallelConfig
from shardyard.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh dimensions.

    Dense parameters: ``world_size = pp x dp_replicate x fsdp x tp``; ``cp`` divides ``fsdp``, for the ranks
    that share a sequence share the parameters too. Experts: ``ep x ep_fsdp = fsdp x tp`` ranks share them.
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


def resolve_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """The layout of ``parallel`` on ``world_size`` ranks.

    Raises:
        UserError: the sizes do not fit; the message has both numbers and the nearest sizes that do.
    """
    if world_size < 1:
        raise UserError(f"the number of ranks must be at least 1, not {world_size}")
    pp, tp, cp, ep = parallel.pp_size, parallel.tp_size, parallel.cp_size, parallel.ep_size
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
    if fsdp * tp % ep or (ep > 1 and ep % tp):
        raise UserError(
            f"parallel.ep_size: {ep} does not divide the {fsdp * tp} ranks of fsdp {fsdp} x tp {tp}, or "
            f"tp {tp} does not divide it; {_nearest_divisors(fsdp * tp, ep)}"
        )
    if parallel.ep_fsdp_size not in (1, fsdp * tp // ep):
        raise UserError(
            f"parallel.ep_fsdp_size: {parallel.ep_fsdp_size} x parallel.ep_size {ep} is not fsdp {fsdp} x "
            f"tp {tp}; leave it at 1, which stands for {fsdp * tp // ep} here"
        )
    return Layout(
        world_size=world_size,
        pp=pp,
        dp_replicate=shared // fsdp,
        fsdp=fsdp,
        cp=cp,
        tp=tp,
        ep=ep,
        ep_fsdp=fsdp * tp // ep,
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
