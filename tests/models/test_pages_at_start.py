"""At start a rank touches about its own share of the weight files' pages, whatever the layout."""

from __future__ import annotations

import pytest
from support.pages import touched_at_start, write_large_model
from support.training import Recipe

soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("experts", "world", "parallel", "limit"),
    [
        (False, 2, {}, 1.2),
        pytest.param(False, 4, {}, 1.2, marks=soak),
        pytest.param(False, 2, {"pp_size": 2}, 1.2, marks=soak),
        pytest.param(False, 2, {"tp_size": 2}, 1.5, marks=soak),
        pytest.param(False, 4, {"tp_size": 2, "fsdp_size": 2}, 1.5, marks=soak),
        pytest.param(True, 2, {"ep_size": 2}, 1.2, marks=soak),
        pytest.param(True, 4, {}, 1.2, marks=soak),
    ],
)
def test_each_rank_touches_its_share_of_the_files(ranks, tmp_path, experts, world, parallel, limit):
    folder = write_large_model(tmp_path / "m", experts=experts, layers=3 if experts else 4)
    for found in ranks.run(world, touched_at_start, folder, Recipe(parallel=parallel)):
        assert 0.99 < found.ratio <= limit
