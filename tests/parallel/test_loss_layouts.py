"""Chunks of logits, z-loss and label smoothing give the numbers of one process on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.parity import CELLS, write_parity_model
from support.training import Recipe, largest_relative_difference, make_rows, train_rows

TOLERANCE = 1e-5
TRAINING: dict[str, Any] = {
    # Adam's first steps divide by the gradient: with a smaller epsilon its rounding is all that is compared.
    "adam_epsilon": 3e-4, "max_grad_norm": 1e9, "z_loss_coef": 0.02, "label_smoothing": 0.1,
}  # fmt: skip
QUICK = {"FSDP 2 x TP 2": "dense", "PP 2": "moe"}
VARIANTS: dict[str, dict[str, Any]] = {
    "the head is recomputed": {"recompute": True, "recompute_modules": ["model.layers.{*}", "lm_head"]},
    "the head stays whole": {"ignored_modules": ["lm_head"]},
    "the head is in the root's unit": {"fsdp_modules": ["model.layers.{*}"]},
    "parameters live on the host": {"cpu_offload": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("loss")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def references(ranks, folders):
    """One process, one micro-batch, one chunk."""
    found: dict[str, Any] = {}

    def reference(family: str) -> Any:
        if family not in found:
            recipe = Recipe(training=TRAINING, steps=3)
            found[family] = ranks.run(1, train_rows, folders[family], make_rows(), recipe)[0]
        return found[family]

    return reference


def same(ours: Any, reference: Any) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


@pytest.mark.parametrize(
    ("cell", "family"),
    [
        pytest.param(
            cell, family, id=f"{cell.name}-{family}",
            marks=() if QUICK.get(cell.name) == family else pytest.mark.soak,
        )
        for cell in CELLS
        for family in cell.families
    ],
)  # fmt: skip
def test_chunks_and_terms_are_the_same_on_every_layout(ranks, folders, references, cell, family):
    recipe = Recipe(
        2 * cell.stages, cell.parallel | {"recompute": True}, TRAINING, steps=3,
        optimization={"chunk_loss_size": 5},
    )  # fmt: skip
    ours = ranks.run(cell.world, train_rows, folders[family], make_rows(), recipe)[0]
    same(ours, references(family))


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        pytest.param(n, c, marks=() if c and n.endswith("recomputed") else pytest.mark.soak)
        for n in VARIANTS
        for c in (None, 5)
    ],
)
def test_wherever_the_output_layer_lives(ranks, folders, references, name, chunk):
    recipe = Recipe(2, VARIANTS[name], TRAINING, steps=3, optimization={"chunk_loss_size": chunk})
    ours = ranks.run(2, train_rows, folders["dense"], make_rows(), recipe)[0]
    same(ours, references("dense"))


@pytest.mark.soak
def test_without_gradients_of_the_head_the_others_are_the_same(ranks, folders):
    """A frozen output layer, its own weights: chunks and whole logits agree on what is trained."""
    recipe = Recipe(training=TRAINING, steps=3, model={"freeze": ["lm_head"]})
    chunked = replace(recipe, optimization={"chunk_loss_size": 5})
    whole, pieces = (
        ranks.run(1, train_rows, folders["moe"], make_rows(), one)[0] for one in (recipe, chunked)
    )
    assert "lm_head.weight" not in pieces.first_grads
    same(pieces, whole)


@pytest.mark.soak
def test_in_bf16_chunks_differ_by_rounding(ranks, folders):
    recipe = Recipe(parallel={"param_dtype": "bf16"}, training=TRAINING, steps=1)
    chunked = replace(recipe, optimization={"chunk_loss_size": 5})
    whole, pieces = (
        ranks.run(2, train_rows, folders["dense"], make_rows(), one)[0] for one in (recipe, chunked)
    )
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-3)
    assert largest_relative_difference(pieces.first_grads, whole.first_grads) <= 0.03
