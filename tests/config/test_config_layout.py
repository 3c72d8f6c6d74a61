"""Mesh sizes for a world: they fit exactly, or the message names both numbers and the nearest that do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.config import ParallelConfig, resolve_layout
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


@pytest.mark.parametrize(
    ("sizes", "world", "parts"),
    [
        ({"fsdp_size": 8}, 4, ["parallel.fsdp_size: 8 is more than the 4 ranks", "start 8 ranks"]),
        (
            {"fsdp_size": 4},
            6,
            ["parallel.fsdp_size: 4 does not divide the 6 ranks", "nearest sizes that do: 3 and 6"],
        ),
        ({"tp_size": 3}, 4, ["parallel.tp_size: 3", "the 4 ranks", "2 and 4", "start 3 or 6 ranks"]),
        ({"cp_size": 3}, 4, ["parallel.cp_size: 3", "parallel.fsdp_size 4", "2 and 4"]),
        ({"ep_size": 2, "ep_fsdp_size": 3}, 4, ["2 x 3 = 6", "the 4 ranks", "nearest sizes that do: 4"]),
        ({}, 0, ["must be at least 1, not 0"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], world: int, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve_layout(ParallelConfig(**sizes), world)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


SIZE = st.integers(min_value=1, max_value=6)


@given(tp=SIZE, fsdp=st.none() | SIZE, cp=SIZE, pp=SIZE, world=st.integers(min_value=1, max_value=64))
def test_a_layout_always_multiplies_to_its_world(
    tp: int, fsdp: int | None, cp: int, pp: int, world: int
) -> None:
    fits = world % (pp * tp) == 0
    if fits:
        size = fsdp or world // (pp * tp)
        fits = (world // (pp * tp)) % size == 0 and size % cp == 0
    try:
        layout = resolve_layout(ParallelConfig(tp_size=tp, fsdp_size=fsdp, cp_size=cp), world, pp=pp)
    except UserError:
        assert not fits
        return
    assert fits
    assert layout.pp * layout.dp_replicate * layout.fsdp * layout.tp == world
    assert layout.data_parallel * layout.cp == layout.dp_replicate * layout.fsdp
