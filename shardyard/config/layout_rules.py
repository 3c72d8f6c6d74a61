"""Every rule that a layout must keep, as one table: the checker, its suggestions and the docs read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardyard.config.families import SPLIT, UNSTAGED
from shardyard.config.layout_wish import Wish
from shardyard.config.model_shape import ModelShape
from shardyard.config.shares import experts_found, experts_too_few, rows_found, rows_too_few

SIZES = ("world", "pp", "tp", "fsdp")


@dataclass(frozen=True)
class LayoutRule:
    """``holds`` is also true where the wish does not tell enough to say no."""

    key: str
    """The setting that is named when the rule is broken."""
    says: str
    """The rule in words, for the docs."""
    fields: tuple[str, ...]
    """The fields of :class:`Wish` that it looks at, apart from ``shape``."""
    holds: Callable[[Wish], bool]
    found: Callable[[Wish], str]
    """What is wrong, with the numbers, for a wish that breaks the rule."""


def broken(wish: Wish) -> Iterator[LayoutRule]:
    """The rules that ``wish`` breaks, in the order of the table."""
    return (rule for rule in RULES if not rule.holds(wish))


def _divides(size: int, number: int | None) -> bool:
    return number is None or number % size == 0


def _of(size: Callable[[ModelShape], int | None]) -> Callable[[Wish], int | None]:
    return lambda wish: None if wish.shape is None else size(wish.shape)


_heads = _of(lambda shape: shape.heads)
_kv_heads = _of(lambda shape: shape.kv_heads)
_intermediate = _of(lambda shape: shape.intermediate)
_shared_experts = _of(lambda shape: shape.shared_intermediate)
_vocab = _of(lambda shape: shape.vocab)
_experts = _of(lambda shape: shape.experts)
_layers = _of(lambda shape: shape.layers)


def _split_by_tp(size: Callable[[Wish], int | None], key: str, what: str) -> LayoutRule:
    """tensor parallelism splits ``size``, which config.json calls ``key``."""
    return LayoutRule(
        "parallel.tp_size",
        f"tp_size divides the model's {what} (`{key}`).",
        ("tp",),
        lambda wish: _divides(wish.tp, size(wish)),
        lambda wish: f"{wish.tp} does not divide the model's {size(wish)} {what} ({key})",
    )


def _local_heads_fit(wish: Wish) -> bool:
    heads = _heads(wish)
    if wish.cp == 1 or wish.cp_type != "ulysses" or heads is None or heads % wish.tp:
        return True
    return heads // wish.tp % wish.cp == 0


def _staged(test: Callable[[Wish], bool]) -> Callable[[Wish], bool]:
    """A rule of pipelines: nothing to ask without one."""
    return lambda wish: wish.pp == 1 or test(wish)


def _stages_match_schedule(wish: Wish) -> bool:
    return (wish.stages_of_rank >= 2) == (wish.schedule == "interleaved_1f1b")


def _list_has_entry_per_stage(wish: Wish) -> bool:
    return wish.layers_per_stage is None or len(wish.layers_per_stage) == wish.stages


def _list_has_all_layers(wish: Wish) -> bool:
    counts, layers = wish.layers_per_stage, _layers(wish)
    return counts is None or (min(counts, default=0) >= 1 and (layers is None or sum(counts) == layers))


def _enough_micro_batches(wish: Wish) -> bool:
    return wish.schedule != "1f1b" or wish.micro_batches is None or wish.micro_batches >= wish.stages


def _whole_rounds(wish: Wish) -> bool:
    if wish.schedule != "interleaved_1f1b" or wish.micro_batches is None:
        return True
    return wish.micro_batches % max(1, wish.micro_batches // wish.pp) == 0


def _second_dimensions(wish: Wish) -> Iterator[tuple[str, int]]:
    """Sizes along dimension 1 of the parameters that FSDP shards as a tp rank holds them."""
    shape, tp = wish.shape, wish.tp
    if shape is None:
        return
    value_dim = shape.value_dim or shape.head_dim
    attention = shape.heads * value_dim if shape.heads and value_dim else None
    sizes = [("hidden size", shape.hidden), ("query rank", shape.query_rank), ("key rank", shape.kv_rank)]
    for name, size in (
        ("attention width", attention),
        ("intermediate size", shape.intermediate),
        ("shared experts' width", shape.shared_intermediate),
    ):
        sizes.append((f"{name} / tp", size // tp if size and size % tp == 0 else None))
    yield from ((name, size) for name, size in sizes if size)


def _expert_second_dimensions(shape: ModelShape) -> Iterator[tuple[str, int]]:
    width, hidden = shape.expert_intermediate, shape.hidden
    if not shape.experts or not width or not hidden:
        return
    # Weights that are [experts, output, input] are read with gate and up joined in dimension 1: for them the
    # next one is split (parallel/experts/placement.py).
    yield "hidden size", hidden
    if shape.experts_transposed:
        yield "experts' width", width


def _uneven(wish: Wish) -> tuple[str, int] | None:
    if wish.shard != "shard_by_dim_1" or wish.shards is None:
        return None
    return next((item for item in _second_dimensions(wish) if item[1] % wish.shards), None)


def _uneven_experts(wish: Wish) -> tuple[str, int] | None:
    shards = wish.expert_shards
    if wish.expert_shard != "shard_by_dim_1" or shards is None or wish.shape is None:
        return None
    return next((item for item in _expert_second_dimensions(wish.shape) if item[1] % shards), None)


def _shown(size: tuple[str, int] | None) -> str:
    return "" if size is None else f"the {size[0]}, {size[1]}"


RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "parallel.pp_size",
        "pp_size divides the number of ranks.",
        ("world", "pp"),
        lambda wish: wish.world is None or wish.world % wish.pp == 0,
        lambda wish: f"{wish.pp} does not divide the {wish.world} ranks",
    ),
    LayoutRule(
        "parallel.tp_size",
        "pp_size x tp_size divides the number of ranks.",
        ("world", "pp", "tp"),
        lambda wish: wish.world is None or wish.world % (wish.pp * wish.tp) == 0,
        lambda wish: (
            f"{wish.tp} does not divide the {wish.world} ranks"
            if wish.pp == 1
            else f"{wish.tp} x parallel.pp_size {wish.pp} does not divide the {wish.world} ranks"
        ),
    ),
    LayoutRule(
        "parallel.fsdp_size",
        "fsdp_size divides ranks / (pp_size x tp_size); what is left over are replicas (HSDP).",
        SIZES,
        lambda wish: wish.fsdp is None or wish.shared is None or wish.shared % wish.fsdp == 0,
        lambda wish: (
            f"{wish.fsdp} does not divide the {wish.shared} ranks "
            f"(world size {wish.world} / (pp {wish.pp} x tp {wish.tp}))"
        ),
    ),
    LayoutRule(
        "parallel.cp_size",
        "cp_size divides fsdp_size, which includes it.",
        (*SIZES, "cp"),
        lambda wish: _divides(wish.cp, wish.shards),
        lambda wish: (
            f"{wish.cp} does not divide parallel.fsdp_size {wish.shards}, which includes the ranks that "
            "share a sequence"
        ),
    ),
    LayoutRule(
        "parallel.ep_size",
        "ep_size divides fsdp_size x tp_size.",
        (*SIZES, "ep"),
        lambda wish: _divides(wish.ep, wish.expert_ranks),
        lambda wish: (
            f"{wish.ep} does not divide the {wish.expert_ranks} ranks of fsdp {wish.shards} x tp {wish.tp}"
        ),
    ),
    LayoutRule(
        "parallel.ep_size",
        "tp_size divides ep_size, or ep_size is 1.",
        ("tp", "ep"),
        lambda wish: wish.ep == 1 or wish.ep % wish.tp == 0,
        lambda wish: f"{wish.ep} is not 1 and not a multiple of parallel.tp_size {wish.tp}",
    ),
    LayoutRule(
        "parallel.ep_fsdp_size",
        "ep_size x ep_fsdp_size = fsdp_size x tp_size; ep_fsdp_size 1 stands for the right number.",
        (*SIZES, "ep", "ep_fsdp"),
        lambda wish: wish.ep_fsdp == 1 or wish.expert_shards in (None, wish.ep_fsdp),
        lambda wish: (
            f"{wish.ep_fsdp} x parallel.ep_size {wish.ep} is not fsdp {wish.shards} x tp {wish.tp}; 1 stands "
            f"for {wish.expert_shards} here"
        ),
    ),
    LayoutRule(
        "parallel.tp_size",
        "tp_size above 1 needs a family that was measured with it: " + ", ".join(sorted(SPLIT)) + ".",
        ("tp",),
        lambda wish: wish.tp == 1 or wish.shape is None or wish.shape.model_type in SPLIT,
        lambda wish: (
            f"{wish.tp}, but model_type {wish.shape.model_type if wish.shape else '?'} is not one of the "
            f"families that were measured with tensor parallelism ({', '.join(sorted(SPLIT))})"
        ),
    ),
    _split_by_tp(_heads, "num_attention_heads", "attention heads"),
    _split_by_tp(_kv_heads, "num_key_value_heads", "key/value heads"),
    _split_by_tp(_intermediate, "intermediate_size", "intermediate size of dense layers"),
    _split_by_tp(_shared_experts, "moe_intermediate_size", "intermediate size of shared experts"),
    _split_by_tp(_vocab, "vocab_size", "vocabulary"),
    LayoutRule(
        "parallel.ep_size",
        "ep_size above 1 needs a model with experts, and divides their number (`num_experts`).",
        ("ep",),
        lambda wish: (
            wish.ep == 1 or (count := _experts(wish)) is None or (count > 0 and count % wish.ep == 0)
        ),
        lambda wish: (
            f"{wish.ep} does not divide the model's {_experts(wish)} experts"
            if _experts(wish)
            else f"{wish.ep}, but the model has no experts"
        ),
    ),
    LayoutRule(
        "parallel.cp_size",
        "with cp_type ulysses, cp_size divides the attention heads of a tp rank.",
        ("tp", "cp", "cp_type"),
        _local_heads_fit,
        lambda wish: (
            f"{wish.cp} does not divide the {(_heads(wish) or 0) // wish.tp} attention heads of each tp "
            "rank, which parallel.cp_type ulysses deals out"
        ),
    ),
    LayoutRule(
        "parallel.pp_stages_per_rank",
        "pp_stages_per_rank is at least 2 with interleaved_1f1b, and 1 with the other schedules.",
        ("pp", "schedule", "stages_per_rank"),
        _staged(_stages_match_schedule),
        lambda wish: (
            f"{wish.stages_per_rank} with parallel.pp_schedule {wish.schedule}, which needs "
            f"{'at least 2' if wish.schedule == 'interleaved_1f1b' else '1'}"
        ),
    ),
    LayoutRule(
        "parallel.pp_size",
        "pp_size above 1 needs a model that is an embedding, layers and a norm; these are not: "
        + ", ".join(sorted(UNSTAGED))
        + ".",
        ("pp",),
        _staged(lambda wish: wish.shape is None or wish.shape.model_type not in UNSTAGED),
        lambda wish: (
            f"{wish.pp}, but {wish.shape.model_type if wish.shape else '?'} models cannot be cut into "
            "pipeline stages"
        ),
    ),
    LayoutRule(
        "parallel.pp_size",
        "a model has at least one layer for each of the pp_size x pp_stages_per_rank stages.",
        ("pp", "schedule", "stages_per_rank"),
        _staged(lambda wish: (layers := _layers(wish)) is None or layers >= wish.stages),
        lambda wish: (
            f"{wish.pp} x {wish.stages_of_rank} stages of each rank are more than the model's "
            f"{_layers(wish)} layers"
        ),
    ),
    LayoutRule(
        "parallel.pp_layers_per_stage",
        "pp_layers_per_stage has one entry for each stage.",
        ("pp", "schedule", "stages_per_rank", "layers_per_stage"),
        _staged(_list_has_entry_per_stage),
        lambda wish: (
            f"{len(wish.layers_per_stage or ())} entries for {wish.stages} stages "
            f"(parallel.pp_size {wish.pp} x {wish.stages_of_rank} on each rank)"
        ),
    ),
    LayoutRule(
        "parallel.pp_layers_per_stage",
        "pp_layers_per_stage gives each stage a layer or more, and all of the model's in sum.",
        ("pp", "layers_per_stage"),
        _staged(_list_has_all_layers),
        lambda wish: (
            "each stage needs at least 1 layer"
            if min(wish.layers_per_stage or (0,)) < 1
            else f"{sum(wish.layers_per_stage or ())} layers in sum; the model has {_layers(wish)}"
        ),
    ),
    LayoutRule(
        "training.gradient_accumulation_steps",
        "1f1b needs a micro-batch (gradient_accumulation_steps) for each stage at least.",
        ("pp", "schedule", "stages_per_rank", "micro_batches"),
        _staged(_enough_micro_batches),
        lambda wish: (
            f"{wish.micro_batches} micro-batches are fewer than the {wish.stages} stages of "
            "parallel.pp_schedule 1f1b (gpipe runs with fewer)"
        ),
    ),
    LayoutRule(
        "training.gradient_accumulation_steps",
        "interleaved_1f1b runs M micro-batches in max(1, M // pp_size) rounds of equal length "
        "(any M up to pp_size, and every multiple of it).",
        ("pp", "schedule", "micro_batches"),
        _staged(_whole_rounds),
        lambda wish: (
            f"{wish.micro_batches} micro-batches do not fill the {(wish.micro_batches or 0) // wish.pp} "
            f"rounds of interleaved_1f1b on parallel.pp_size {wish.pp}; a multiple of {wish.pp} does"
        ),
    ),
    LayoutRule(
        "parallel.fsdp_size",
        "with tp_size, each fsdp rank holds a row or more of every layer that tp splits, or fsdp_size "
        "divides its columns (the hidden size, most often).",
        (*SIZES, "shard"),
        lambda wish: rows_too_few(wish) is None,
        rows_found,
    ),
    LayoutRule(
        "parallel.ep_fsdp_size",
        "each of the ranks that share the experts of an ep rank (fsdp_size x tp_size / ep_size) holds one or "
        "more, or they divide the hidden size.",
        (*SIZES, "ep", "expert_shard"),
        lambda wish: not experts_too_few(wish),
        experts_found,
    ),
    LayoutRule(
        "parallel.shard_placement_fn",
        "shard_by_dim_1 splits evenly only: fsdp_size divides dimension 1 of each parameter.",
        (*SIZES, "shard"),
        lambda wish: _uneven(wish) is None,
        lambda wish: (
            f"shard_by_dim_1 cannot split {_shown(_uneven(wish))}, over {wish.shards} ranks (fsdp) evenly"
        ),
    ),
    LayoutRule(
        "parallel.efsdp_shard_placement_fn",
        "the same of experts: ep_fsdp_size divides the hidden size, and gpt_oss's width of experts.",
        (*SIZES, "ep", "expert_shard"),
        lambda wish: _uneven_experts(wish) is None,
        lambda wish: (
            f"shard_by_dim_1 cannot split {_shown(_uneven_experts(wish))}, over {wish.expert_shards} "
            "ranks (ep_fsdp) evenly"
        ),
    ),
)
"""In the order in which they are reported: only the first broken one is."""
