"""Layouts in which a rank would be left without a row of a tensor, where the reader of weights needs one.

transformers' reader fails on a rank that holds no row of what two axes split by rows, and on one that holds
no expert where a file has each expert apart. parallel/fsdp.py and parallel/experts/placement.py take another
dimension then, if the ranks divide it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardyard.config.layout_wish import Wish


def leaves_a_rank_empty(rows: int, ranks: int) -> bool:
    """Whether one of ``ranks`` holds none: torch gives each ceil(rows / ranks) until none is left."""
    return (ranks - 1) * -(-rows // ranks) >= rows


def rows_too_few(wish: Wish) -> tuple[str, int, int] | None:
    """(name, rows on a tp rank, columns) of the first layer that fsdp can split by neither."""
    shards = wish.shards
    if shards is None or wish.shard == "shard_by_dim_1":
        return None
    layers = ((name, rows // wish.tp, columns) for name, rows, columns in _layers_of_tp(wish) if rows)
    return next((one for one in layers if leaves_a_rank_empty(one[1], shards) and one[2] % shards), None)


def rows_found(wish: Wish) -> str:
    """What `rows_too_few` found, in words."""
    name, rows, columns = rows_too_few(wish) or ("", 0, 0)
    return (
        f"{wish.shards} ranks (fsdp) share the {rows} rows of {name} that a tp rank has; one would hold "
        f"none, and the {columns} columns do not divide"
    )


def _layers_of_tp(wish: Wish) -> Iterator[tuple[str, int, int]]:
    """(name, rows on all tp ranks, columns) of what tp splits by rows."""
    shape = wish.shape
    if shape is None or wish.tp == 1 or not shape.hidden:
        return
    heads, nope, hidden = shape.heads or 0, shape.nope_dim or 0, shape.hidden
    if shape.kv_rank:
        yield "latent keys and values", heads * (nope + (shape.value_dim or 0)), shape.kv_rank
        yield "queries", heads * (nope + (shape.rope_dim or 0)), shape.query_rank or hidden
    else:
        yield "keys", (shape.kv_heads or 0) * (shape.head_dim or 0), hidden
        yield "queries", heads * (shape.head_dim or 0), hidden
    yield "dense layers", shape.intermediate or 0, hidden
    yield "shared experts", shape.shared_intermediate or 0, hidden
    yield "the vocabulary", shape.vocab or 0, hidden


def experts_too_few(wish: Wish) -> bool:
    """Whether a rank would hold no expert, and the ranks divide no other dimension that may be split."""
    shape, shards = wish.shape, wish.expert_shards
    if shape is None or shards is None or not shape.experts or shape.experts % wish.ep:
        return False
    stored_as_held = shape.experts_transposed and wish.ep == 1
    if stored_as_held or not leaves_a_rank_empty(shape.experts // wish.ep, shards):
        return False
    if wish.expert_shard != "auto":
        return wish.expert_shard == "shard_by_dim_0"
    joined = 2 * (shape.expert_intermediate or 0) if shape.experts_transposed else 0
    return bool((shape.hidden or 0) % shards or joined % shards)


def experts_found(wish: Wish) -> str:
    """What `experts_too_few` found, in words."""
    shape = wish.shape
    assert shape is not None
    other = (
        f"the hidden size {shape.hidden} does not divide"
        if wish.expert_shard == "auto"
        else f"parallel.efsdp_shard_placement_fn: {wish.expert_shard} allows no other split"
    )
    return (
        f"{wish.expert_shards} ranks (fsdp x tp / ep) share {shape.experts // wish.ep} experts; one would "
        f"hold none, and {other}"
    )
