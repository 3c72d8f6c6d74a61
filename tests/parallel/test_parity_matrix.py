"""Invariant: no layout changes the mathematics. Each cell of the matrix gives the numbers of one process.

`make soak` runs every layout x model x {plain, accumulation 2, recompute, clipping, all of them}; `make test`
runs each layout once. benchmarks/parity.py prints the same cells as a table.
"""

from __future__ import annotations

import pytest
from support.parity import CELLS, VARIANTS, recipe_of, reference_of, write_parity_model
from support.training import Outcome, largest_relative_difference, make_rows, train_rows

TOLERANCE = 1e-5

CASES = [(cell, family, variant) for cell in CELLS for family in cell.families for variant in VARIANTS]
# Dense and experts in turn, everything on: what fails there is told apart by the soak's single variants.
SAMPLE = {(cell.name, cell.families[i % len(cell.families)], "all") for i, cell in enumerate(CELLS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parity")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def references(ranks, folders):
    found: dict[tuple[str, float], Outcome] = {}

    def reference(family: str, variant: str) -> Outcome:
        recipe = reference_of(variant)
        key = (family, recipe.training["max_grad_norm"])
        if key not in found:
            found[key] = ranks.run(1, train_rows, folders[family], make_rows(), recipe)[0]
        return found[key]

    return reference


@pytest.mark.parametrize(
    ("cell", "family", "variant"),
    [
        pytest.param(
            cell, family, variant, id=f"{cell.name}-{family}-{variant}",
            marks=() if (cell.name, family, variant) in SAMPLE else pytest.mark.soak,
        )
        for cell, family, variant in CASES
    ],
)  # fmt: skip
def test_layout_changes_nothing(ranks, folders, references, cell, family, variant):
    ours = ranks.run(cell.world, train_rows, folders[family], make_rows(), recipe_of(cell, variant))[0]
    reference = references(family, variant)
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


def test_clipping_is_active_in_the_variant_that_says_so(references):
    for family in ("dense", "moe"):
        assert min(references(family, "all").norms) > 10 * VARIANTS["all"]["max_grad_norm"]
        assert references(family, "plain").weights.keys() == references(family, "all").weights.keys()
        clipped, free = references(family, "all").weights, references(family, "plain").weights
        assert largest_relative_difference(clipped, free) > 1e-3
