"""A layout in words: who shares what, and what a step is made of."""

from __future__ import annotations

from shardyard.config.layout import Layout
from shardyard.config.schema import Config

_GROUPS_SHOWN = 2
_RANKS_SHOWN = 8


def layout_lines(config: Config, layout: Layout) -> list[str]:
    """What ``shardyard check --world-size N`` prints about a layout that fits."""
    sizes = (
        f"layout on {layout.world_size} ranks: pp {layout.pp} x dp_replicate {layout.dp_replicate} x "
        f"fsdp {layout.fsdp} x tp {layout.tp}; cp {layout.cp} of fsdp; experts: ep {layout.ep} x "
        f"ep_fsdp {layout.ep_fsdp}"
    )
    return [sizes, *_sharing(layout), *_step(config, layout)]


def _sharing(layout: Layout) -> list[str]:
    """Which ranks form a group of each kind, with the innermost groups first."""
    stage = layout.world_size // layout.pp
    kinds = [
        ("each tensor (tp)", layout.tp, 1),
        ("a sequence (cp)", layout.cp, layout.tp),
        ("the parameters (fsdp)", layout.fsdp, layout.tp),
        ("replicas of the same shard (dp_replicate)", layout.dp_replicate, layout.fsdp * layout.tp),
        ("the layers (pp)", layout.pp, stage),
        ("the experts (ep)", layout.ep, 1),
        ("each expert (ep_fsdp)", layout.ep_fsdp if layout.ep > 1 or layout.tp > 1 else 1, layout.ep),
    ]
    width = max(len(name) for name, _, _ in kinds)
    return [
        f"  {name:<{width}}  {size} ranks: {_groups(layout.world_size, size, step)}"
        for name, size, step in kinds
        if size > 1
    ]


def _groups(world: int, size: int, step: int) -> str:
    """The first groups of ``size`` ranks that lie ``step`` apart."""
    span = size * step
    firsts = [start + offset for start in range(0, min(world, 2 * span), span) for offset in range(step)]
    shown = [_ranks(first, size, step) for first in firsts[:_GROUPS_SHOWN]]
    return ", ".join([*shown, "..."] if world // size > len(shown) else shown)


def _ranks(first: int, size: int, step: int) -> str:
    ranks = [str(first + step * index) for index in range(min(size, _RANKS_SHOWN))]
    if size > _RANKS_SHOWN:
        ranks = [*ranks[: _RANKS_SHOWN - 2], "...", str(first + step * (size - 1))]
    return f"({' '.join(ranks)})"


def _step(config: Config, layout: Layout) -> list[str]:
    rows, micro_batches = (
        config.training.per_device_train_batch_size,
        config.training.gradient_accumulation_steps,
    )
    batch = layout.data_parallel * micro_batches * rows
    longest = config.data.cutoff_len
    parts = layout.cp * layout.tp
    of_rank = f" / {parts} (cp x tp)" if parts > 1 else ""
    what = "packs" if config.data.packing or config.data.neat_packing else "samples"
    budget = config.training.max_tokens_per_micro_batch
    if budget is not None:
        largest = max(budget, longest)
        return [
            f"  a step: {batch} {what}, up to {batch * longest} tokens",
            f"  a rank: as few micro-batches as hold {budget} tokens (one {what[:-1]} may have {longest}), "
            f"of up to {largest}{of_rank} tokens, {-(-largest // parts)} at a time",
        ]
    return [
        f"  a step: {layout.data_parallel} data-parallel x {micro_batches} micro-batches"
        f" x {rows} {what} = {batch} {what}, up to {batch * longest} tokens",
        f"  a rank: {micro_batches} micro-batches of up to {rows * longest}{of_rank} tokens, "
        f"{-(-rows * longest // parts)} at a time",
    ]
