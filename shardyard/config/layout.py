"""How the ranks of a run are arranged: the sizes of its meshes, computed without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardyard.config.layout_rules import broken
from shardyard.config.layout_wish import Wish
from shardyard.config.model_shape import ModelShape, read_shape
from shardyard.config.nearest import nearest, nearest_worlds
from shardyard.config.schema import Config
from shardyard.config.sections.parallel import ParallelConfig
from shardyard.config.support import refuse_pairs_of_replicas
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.config.loader import Loaded

_MOST_RANKS = 2**20


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

    def __str__(self) -> str:
        """The axes that are more than one, as `pp 2 x fsdp 4 x tp 2, cp 2`."""
        dense = [("pp", self.pp), ("replicas", self.dp_replicate), ("fsdp", self.fsdp), ("tp", self.tp)]
        inside = [("cp", self.cp), ("ep", self.ep)]
        outer = " x ".join(f"{name} {size}" for name, size in dense if size > 1) or "one rank"
        return ", ".join([outer, *(f"{name} {size}" for name, size in inside if size > 1)])

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples: replicas and shards, less those that share a sequence."""
        return self.dp_replicate * self.fsdp // self.cp


def layout_of(config: Config, world_size: int) -> Layout:
    """The layout of a run on ``world_size`` ranks; its model's config.json counts, if it is on this machine.

    Raises:
        UserError: the sizes do not fit the ranks, each other, the model or the micro-batches of a step; the
            message has the numbers, and overrides that fit.
    """
    shape, _ = read_shape(config.model)
    layout = resolve_layout(config.parallel, world_size, shape, _micro_batches(config))
    _refuse_reshard(config.parallel, layout)
    if layout.dp_replicate > 1:
        refuse_pairs_of_replicas(config, shape)
    return layout


def layout_on(loaded: Loaded, world_size: int | None) -> Layout | None:
    """As :func:`layout_of`, and a refusal tells the line of the setting that it names. ``world_size`` None:
    only the rules that hold on any number of ranks are looked at.

    Raises:
        UserError: as :func:`layout_of`.
    """
    try:
        if world_size is None:
            return check_sizes(loaded.config)
        return layout_of(loaded.config, world_size)
    except UserError as error:
        origin = loaded.origins.get(str(error).partition(":")[0])
        if origin is None or origin.kind != "file":
            raise
        raise UserError(f"{origin.place}  {error}") from error


def resolve_layout(
    parallel: ParallelConfig,
    world_size: int,
    shape: ModelShape | None = None,
    micro_batches: int | None = None,
) -> Layout:
    """The layout of ``parallel`` on ``world_size`` ranks; rules of what is None are left out.

    Raises:
        UserError: the sizes do not fit; the message has the numbers, and overrides that fit.
    """
    if not 1 <= world_size <= _MOST_RANKS:
        raise UserError(f"the number of ranks must be from 1 to {_MOST_RANKS}, not {world_size}")
    wish = Wish.of(parallel, world_size, shape, micro_batches)
    _refuse(wish)
    assert wish.shared and wish.shards and wish.expert_shards
    return Layout(
        world_size=world_size,
        pp=wish.pp,
        dp_replicate=wish.shared // wish.shards,
        fsdp=wish.shards,
        cp=wish.cp,
        tp=wish.tp,
        ep=wish.ep,
        ep_fsdp=wish.expert_shards,
    )


def fewest_ranks(config: Config) -> int:
    """The smallest number of ranks on which the layout of ``config`` fits.

    Raises:
        UserError: it fits no number of ranks.
    """
    check_sizes(config)
    shape, _ = read_shape(config.model)
    wish = Wish.of(config.parallel, 1, shape, _micro_batches(config))
    if next(broken(wish), None) is None:
        return 1
    return next(iter(nearest_worlds(wish)), 1)


def check_sizes(config: Config) -> None:
    """The rules that hold on any number of ranks.

    Raises:
        UserError: as :func:`layout_of`.
    """
    shape, _ = read_shape(config.model)
    _refuse(Wish.of(config.parallel, None, shape, _micro_batches(config)))


def _micro_batches(config: Config) -> int | None:
    """Of a step; None where lengths decide, which makes as many as a pipeline needs."""
    training = config.training
    return training.gradient_accumulation_steps if training.max_tokens_per_micro_batch is None else None


def _refuse_reshard(parallel: ParallelConfig, layout: Layout) -> None:
    number = parallel.reshards_to
    if number is not None and layout.fsdp % number:
        fits = [size for size in range(2, layout.fsdp + 1) if layout.fsdp % size == 0]
        raise UserError(
            f"parallel.reshard_after_forward: {number} does not divide the {layout.fsdp} ranks that share "
            f"the parameters; take {', '.join(map(str, fits)) or 'true or false'}"
        )


def _refuse(wish: Wish) -> None:
    rule = next(broken(wish), None)
    if rule is None:
        return
    lines = [f"{rule.key}: {rule.found(wish)}", *(f"  try: {fit}" for fit in nearest(wish))]
    if worlds := nearest_worlds(wish):
        lines.append(f"  or start {' or '.join(map(str, worlds))} ranks")
    raise UserError("\n".join(lines))
