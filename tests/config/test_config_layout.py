"""Mesh sizes for a world and a model: accepted exactly when they fit, else refused with sizes that do."""

from __future__ import annotations

import re
import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.config import ModelShape, ParallelConfig, resolve_layout
from shardyard.errors import UserError


@pytest.mark.parametrize("world", [1, 2, 3, 8, 256])
def test_fsdp_size_defaults_to_the_world(world: int) -> None:
    layout = resolve_layout(ParallelConfig(ep_size=1, ep_fsdp_size=1), world)
    assert (layout.fsdp, layout.dp_replicate, layout.data_parallel) == (world, 1, world)


def test_a_smaller_fsdp_size_keeps_replicas() -> None:
    layout = resolve_layout(ParallelConfig(fsdp_size=2), 8)
    assert (layout.fsdp, layout.dp_replicate, layout.data_parallel) == (2, 4, 8)


def test_context_parallel_ranks_lie_inside_fsdp() -> None:
    layout = resolve_layout(ParallelConfig(tp_size=2, cp_size=2), 16)
    assert (layout.fsdp, layout.cp, layout.data_parallel) == (8, 2, 4)


def test_experts_lie_inside_fsdp_and_tp_and_their_shards_are_derived() -> None:
    layout = resolve_layout(ParallelConfig(pp_size=2, tp_size=2, ep_size=4, fsdp_size=4), 32)
    assert (layout.pp, layout.dp_replicate, layout.fsdp, layout.tp) == (2, 2, 4, 2)
    assert (layout.ep, layout.ep_fsdp) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "world", "parts"),
    [
        ({"fsdp_size": 8}, 4, ["parallel.fsdp_size: 8 does not divide the 4 ranks", "start 8 ranks"]),
        (
            {"fsdp_size": 4},
            6,
            [
                "parallel.fsdp_size: 4 does not divide the 6 ranks",
                "try: parallel.fsdp_size=3",
                "try: parallel.fsdp_size=null",
                "start 4 or 8 ranks",
            ],
        ),
        (
            {"tp_size": 3},
            4,
            [
                "parallel.tp_size: 3 does not divide the 4 ranks",
                "try: parallel.tp_size=2",
                "start 3 or 6 ranks",
            ],
        ),
        ({"cp_size": 3}, 4, ["parallel.cp_size: 3", "parallel.fsdp_size 4", "=2\n", "=4\n"]),
        (
            {"ep_size": 2, "ep_fsdp_size": 3},
            4,
            ["parallel.ep_fsdp_size: 3 x parallel.ep_size 2", "try: parallel.ep_fsdp_size=1"],
        ),
        (
            {"tp_size": 4, "ep_size": 2},
            8,
            ["parallel.ep_size: 2 is not 1 and not a multiple of", "tp_size 4"],
        ),
        ({}, 0, ["must be from 1 to 1048576, not 0"]),
        ({}, 2**20 + 1, ["must be from 1 to 1048576, not 1048577"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], world: int, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve_layout(ParallelConfig.model_validate(sizes), world)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


SIZE = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 4, 6, 8])
WISHES = st.fixed_dictionaries(
    {
        "pp_size": SIZE,
        "tp_size": SIZE,
        "fsdp_size": st.none() | SIZE,
        "cp_size": SIZE,
        "ep_size": SIZE,
        "ep_fsdp_size": SIZE,
        "cp_type": st.sampled_from(["ulysses", "ring", "kvallgather"]),
        "pp_schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]),
        "pp_stages_per_rank": st.sampled_from([None, None, 1, 2, 3]),
        "pp_layers_per_stage": st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
        "shard_placement_fn": st.sampled_from([None, None, "shard_by_dim_0", "shard_by_dim_1"]),
        "efsdp_shard_placement_fn": st.sampled_from(["auto", "shard_by_dim_0", "shard_by_dim_1"]),
    }
)
WORLD = st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 5, 30])
DENSE = st.builds(
    ModelShape,
    model_type=st.sampled_from(["qwen3", "qwen3", "llama", "mamba"]),
    layers=st.integers(1, 12),
    dense_layers=st.just(1),
    hidden=st.sampled_from([24, 30, 48]),
    heads=st.sampled_from([4, 6, 8, 12]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 6]),
    intermediate=st.sampled_from([48, 50, 96]),
    vocab=st.sampled_from([96, 200, 201]),
)
MOE = st.builds(
    ModelShape,
    model_type=st.sampled_from(["qwen3_moe", "deepseek_v3", "gpt_oss"]),
    layers=st.integers(1, 12),
    dense_layers=st.just(0),
    hidden=st.sampled_from([24, 48]),
    heads=st.sampled_from([4, 8, 12]),
    kv_heads=st.sampled_from([2, 4]),
    head_dim=st.sampled_from([4, 6]),
    vocab=st.sampled_from([96, 192]),
    experts=st.sampled_from([4, 6, 8, 16]),
    expert_intermediate=st.sampled_from([12, 16]),
    experts_transposed=st.booleans(),
    shared_intermediate=st.sampled_from([None, 12, 16]),
    kv_rank=st.sampled_from([None, 6, 8]),
)
SHAPES = st.none() | DENSE | MOE
MEASURED = {"qwen3", "llama", "qwen3_moe", "deepseek_v3", "gpt_oss"}


def _fits(wish: dict[str, Any], world: int, shape: ModelShape | None, micro_batches: int) -> bool:
    """The rules once more, by trying every arrangement of ranks rather than by arithmetic on sizes."""
    for fsdp in range(1, world + 1):
        replicas, rest = divmod(world, wish["pp_size"] * fsdp * wish["tp_size"])
        if rest:
            continue
        if wish["fsdp_size"] not in (None, fsdp) or (wish["fsdp_size"] is None and replicas > 1):
            continue
        return _splits(wish, fsdp, shape) and _stages_fit(wish, shape, micro_batches)
    return False


def _even(number: int | None, parts: int) -> bool:
    return number is None or len({len(range(part, number, parts)) for part in range(parts)}) == 1


def _hold_some(rows: int | None, ranks: int) -> bool:
    """Whether each rank has a row when they are dealt as torch.chunk does: full hands until none is left."""
    hand = next(size for size in range((rows or ranks) + 1) if size * ranks >= (rows or ranks))
    return rows is None or len(range(0, rows, hand)) == ranks


def _all_hold_some(wish: dict[str, Any], fsdp: int, expert_shards: int, shape: ModelShape) -> bool:
    """Rows that tp has cut, and experts, reach every rank, or another dimension is split evenly instead."""
    tp, ep = wish["tp_size"], wish["ep_size"]
    assert shape.heads and shape.kv_heads and shape.head_dim
    rows = [shape.vocab, shape.intermediate, shape.shared_intermediate]
    if shape.kv_rank is None:
        rows += [shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim]
    by_rows = tp > 1 and wish["shard_placement_fn"] != "shard_by_dim_1" and not _even(shape.hidden, fsdp)
    if by_rows and not all(_hold_some(size // tp, fsdp) for size in rows if size):
        return False
    if not shape.experts or (shape.experts_transposed and ep == 1):
        return True
    if wish["efsdp_shard_placement_fn"] == "shard_by_dim_1" or _hold_some(shape.experts // ep, expert_shards):
        return True
    widths = [shape.hidden, 2 * (shape.expert_intermediate or 0) if shape.experts_transposed else None]
    by_width = all(_even(width, expert_shards) for width in widths)
    return wish["efsdp_shard_placement_fn"] == "auto" and by_width


def _splits(wish: dict[str, Any], fsdp: int, shape: ModelShape | None) -> bool:
    tp, cp, ep = wish["tp_size"], wish["cp_size"], wish["ep_size"]
    expert_shards = [size for size in range(1, fsdp * tp + 1) if size * ep == fsdp * tp]
    fits = [_even(fsdp, cp), len(expert_shards) == 1, ep == 1 or _even(ep, tp)]
    fits.append(wish["ep_fsdp_size"] == 1 or [wish["ep_fsdp_size"]] == expert_shards)
    if shape is None or not all(fits):
        return all(fits)
    fits.append(tp == 1 or shape.model_type in MEASURED)
    fits += [_even(n, tp) for n in (shape.heads, shape.intermediate, shape.shared_intermediate, shape.vocab)]
    fits.append(_even(shape.kv_heads, tp))
    fits.append(ep == 1 or (shape.experts > 0 and _even(shape.experts, ep)))
    assert shape.heads and shape.head_dim and shape.hidden
    if not all(fits):
        return False
    fits.append(wish["cp_type"] != "ulysses" or _even(shape.heads // tp, cp))
    if wish["shard_placement_fn"] == "shard_by_dim_1":
        split = [shape.heads * shape.head_dim, shape.intermediate, shape.shared_intermediate]
        widths = [shape.hidden, shape.kv_rank, *(size // tp for size in split if size)]
        fits += [_even(width, fsdp) for width in widths]
    if wish["efsdp_shard_placement_fn"] == "shard_by_dim_1" and shape.experts:
        widths = [shape.hidden, shape.expert_intermediate if shape.experts_transposed else None]
        fits += [_even(width, expert_shards[0]) for width in widths]
    return all(fits) and _all_hold_some(wish, fsdp, expert_shards[0], shape)


def _stages_fit(wish: dict[str, Any], shape: ModelShape | None, micro_batches: int) -> bool:
    pp, schedule, counts = wish["pp_size"], wish["pp_schedule"], wish["pp_layers_per_stage"]
    if pp == 1:
        return True
    interleaved = schedule == "interleaved_1f1b"
    of_rank = wish["pp_stages_per_rank"] or (2 if interleaved else 1)
    if (of_rank == 1) == interleaved:
        return False
    layers = shape.layers if shape else None
    if layers is not None and layers < pp * of_rank:
        return False
    if counts is not None and (len(counts) != pp * of_rank or 0 in counts):
        return False
    if counts is not None and layers is not None and sum(counts) != layers:
        return False
    if schedule == "1f1b":
        return micro_batches >= pp
    return not interleaved or micro_batches < pp or micro_batches % (micro_batches // pp) == 0


AXES = ("pp_size", "tp_size", "fsdp_size", "cp_size", "ep_size")


def _one_change_fits(wish: dict[str, Any], world: int, shape: ModelShape | None, micro_batches: int) -> bool:
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    return any(
        _fits({**wish, axis: size}, world, shape, micro_batches)
        for axis in AXES
        if wish[axis] not in (None, 1)
        for size in sizes
    )


def _overrides(message: str) -> list[dict[str, str]]:
    lines = re.findall(r"^  try: (.+)$", message, flags=re.M)
    return [dict(word.split("=") for word in line.split()) for line in lines]


def _agrees(wish: dict[str, Any], world: int, shape: ModelShape | None, micro_batches: int) -> None:
    parallel = ParallelConfig.model_validate(wish)
    try:
        layout = resolve_layout(parallel, world, shape, micro_batches)
    except UserError as error:
        assert not _fits(wish, world, shape, micro_batches), (wish, world, shape, micro_batches, str(error))
        suggestions = _overrides(str(error))
        assert suggestions, str(error)
        if _one_change_fits(wish, world, shape, micro_batches):
            assert all(len(words) == 1 for words in suggestions), (wish, world, shape, str(error))
        for words in suggestions:
            steps = int(words.pop("training.gradient_accumulation_steps", micro_batches))
            names = {key.removeprefix("parallel."): value for key, value in words.items()}
            values = {k: None if v == "null" else int(v) if v.isdigit() else v for k, v in names.items()}
            assert values.items() - wish.items() or steps != micro_batches
            assert _fits({**wish, **values}, world, shape, steps), (wish, world, shape, words)
        return
    assert _fits(wish, world, shape, micro_batches), (wish, world, shape, micro_batches)
    assert layout.pp * layout.dp_replicate * layout.fsdp * layout.tp == world
    assert layout.data_parallel * layout.cp == layout.dp_replicate * layout.fsdp
    assert layout.ep * layout.ep_fsdp == layout.fsdp * layout.tp


@settings(deadline=None, max_examples=150)
@given(wish=WISHES, world=WORLD, shape=SHAPES, micro_batches=st.integers(1, 12))
def test_a_layout_is_accepted_exactly_when_it_fits_and_every_suggestion_fits(
    wish: dict[str, Any], world: int, shape: ModelShape | None, micro_batches: int
) -> None:
    _agrees(wish, world, shape, micro_batches)


@pytest.mark.soak
@settings(deadline=None, max_examples=5_000)
@given(wish=WISHES, world=WORLD, shape=SHAPES, micro_batches=st.integers(1, 12))
def test_many_layouts_are_accepted_exactly_when_they_fit(
    wish: dict[str, Any], world: int, shape: ModelShape | None, micro_batches: int
) -> None:
    _agrees(wish, world, shape, micro_batches)


def test_a_search_over_many_ranks_is_short() -> None:
    wish = ParallelConfig(
        pp_size=19, tp_size=17, fsdp_size=31, cp_size=23, ep_size=29, ep_fsdp_size=37,
        shard_placement_fn="shard_by_dim_1", pp_layers_per_stage=(1, 2),
    )  # fmt: skip
    shape = ModelShape("qwen3", layers=60, heads=64, kv_heads=8, hidden=4096, vocab=151936, experts=128)
    started = time.process_time()
    with pytest.raises(UserError, match="try: "):
        resolve_layout(wish, 720_720, shape, 1)  # 240 divisors, and six settings have to change
    assert time.process_time() - started < 5


FEW = (1, 2, 3, 4)
TINY = ModelShape(
    "qwen3_moe", layers=4, dense_layers=0, heads=4, kv_heads=2, head_dim=2, vocab=12, experts=6, hidden=8
)


def test_every_small_layout_of_a_tiny_model_is_judged_right() -> None:
    sizes = ("pp_size", "tp_size", "fsdp_size", "cp_size", "ep_size")
    accepted = 0
    for values in product(FEW, (1, 2, 4), (None, 1, 2, 4), (1, 2, 4), (1, 2, 3, 6)):
        wish = {field: ParallelConfig.model_fields[field].default for field in ParallelConfig.model_fields}
        wish |= dict(zip(sizes, values, strict=True))
        for world in (8, 12):
            fits = _fits(wish, world, TINY, 4)
            accepted += fits
            try:
                resolve_layout(ParallelConfig.model_validate(wish), world, TINY, 4)
            except UserError as error:
                assert not fits, (values, world, str(error))
            else:
                assert fits, (values, world)
    assert accepted > 20


def test_a_refusal_names_the_line_that_set_the_size(tmp_path):
    from shardyard.config import layout_on, load_config

    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {model_name_or_path: m}\ndata: {dataset: d, template: null}\n"
        "parallel:\n  tp_size: 3\ntraining: {output_dir: o}\n"
    )
    with pytest.raises(UserError) as caught:
        layout_on(load_config([str(file)]), 8)
    assert str(caught.value).startswith(f"{file}:4:12  parallel.tp_size: 3 does not divide the 8 ranks")
    with pytest.raises(UserError, match=r"^parallel\.tp_size: 5 does not divide"):
        layout_on(load_config([str(file), "--parallel.tp_size", "5"]), 8)
