"""Whole steps with the operators' switches on and off: the same losses, norms, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parity import write_parity_model
from support.ranks import RankPool
from support.training import Outcome, Recipe, make_rows, train_rows

SWITCHES = (
    "use_fused_rmsnorm", "use_fused_rotary_pos_emb", "use_flash_attn", "use_fused_swiglu", "moe_grouped_gemm",
)  # fmt: skip
OFF: dict[str, Any] = dict.fromkeys(SWITCHES, False)
ON: dict[str, Any] = dict.fromkeys(SWITCHES, True)
ROWS = make_rows(8)
_TRAINING = {"adam_epsilon": 1e-4}

# (family, ranks, accumulation, parallel)
LAYOUTS = {
    "one rank": ("moe", 1, 2, {}),
    "recompute": ("dense", 1, 1, {"recompute": True}),
    "tp 2": ("dense", 2, 1, {"tp_size": 2}),
    "ep 2": ("moe", 2, 1, {"ep_size": 2}),
    "pp 2": ("dense", 2, 2, {"pp_size": 2}),
    "cp 2, ulysses": ("dense", 2, 1, {"cp_size": 2, "cp_type": "ulysses"}),
}
QUICK = ("one rank", "tp 2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("operators")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def plain(ranks: RankPool, folders: dict[str, Path]) -> Iterator[Any]:
    """The family's own code on one rank, by family."""
    found: dict[str, Outcome] = {}

    def of(family: str) -> Outcome:
        if family not in found:
            recipe = Recipe(steps=2, training=_TRAINING, optimization=OFF)
            (found[family],) = ranks.run(1, train_rows, folders[family], ROWS, recipe)
        return found[family]

    yield of


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in LAYOUTS]
)
def test_operators_change_nothing_but_rounding(
    ranks: RankPool, folders: dict[str, Path], plain: Any, layout: str
) -> None:
    family, world, accumulation, parallel = LAYOUTS[layout]
    recipe = Recipe(
        steps=2,
        accumulation=accumulation,
        parallel=parallel,
        training=_TRAINING,
        optimization=ON | _dense(family),
    )
    _same(ranks.run(world, train_rows, folders[family], ROWS, recipe)[0], plain(family))


def _dense(family: str) -> dict[str, Any]:
    """A dense model has no experts to ask for."""
    return {} if family == "moe" else {"moe_grouped_gemm": "auto"}


@pytest.mark.soak
@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_alone_changes_nothing_but_rounding(
    ranks: RankPool, folders: dict[str, Path], plain: Any, switch: str
) -> None:
    recipe = Recipe(steps=2, training=_TRAINING, optimization=OFF | {switch: True})
    _same(ranks.run(1, train_rows, folders["moe"], ROWS, recipe)[0], plain("moe"))


def _same(found: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    for have, want in ((found.first_grads, expected.first_grads), (found.weights, expected.weights)):
        assert have.keys() == want.keys()
        for name, tensor in want.items():
            assert np.abs(have[name] - tensor).max() <= 1e-5 * np.abs(tensor).max(), name
