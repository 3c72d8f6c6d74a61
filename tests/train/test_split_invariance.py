"""Invariant: splitting the same rows over ranks, accumulation, recompute, offload and replicas changes only
rounding.
"""

from __future__ import annotations

import itertools

import pytest
from support.models import write_tiny_model
from support.training import Outcome, Recipe, largest_relative_difference, make_rows, train_rows

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}
TOLERANCE = 1e-5

CASES = list(itertools.product((1, 2, 4), (1, 2, 4), (False, True), (False, True)))
# One case of each value of each axis, and the largest world with everything on.
SAMPLE = {
    (1, 2, True, True),
    (2, 1, True, False),
    (2, 4, False, True),
    (4, 2, True, True),
    (4, 4, False, False),
}


def _recipe(accumulation: int = 1, **parallel: object) -> Recipe:
    return Recipe(accumulation=accumulation, parallel=dict(parallel), training=TRAINING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def reference(ranks, folder) -> Outcome:
    return ranks.run(1, train_rows, folder, make_rows(), _recipe())[0]


def assert_same(ours: Outcome, reference: Outcome) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


@pytest.mark.parametrize(
    ("world", "accumulation", "recompute", "offload"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.soak) for case in CASES],
)
def test_split_changes_nothing(ranks, folder, reference, world, accumulation, recompute, offload):
    recipe = _recipe(accumulation, recompute=recompute, cpu_offload=offload)
    assert_same(ranks.run(world, train_rows, folder, make_rows(), recipe)[0], reference)


def test_hybrid_sharding_2x2_changes_nothing(ranks, folder, reference):
    assert_same(ranks.run(4, train_rows, folder, make_rows(), _recipe(2, fsdp_size=2))[0], reference)


def test_one_document_per_forward_changes_nothing(ranks, folder, reference):
    """Ranks with fewer documents run fillers, so that the collectives match."""
    recipe = Recipe(accumulation=2, training=TRAINING, packed=False)
    assert_same(ranks.run(2, train_rows, folder, make_rows(), recipe)[0], reference)


def test_ignored_modules_are_still_summed(ranks, folder, reference):
    recipe = _recipe(2, ignored_modules=["model.layers.{*}.self_attn.q_proj", "model.norm"])
    assert_same(ranks.run(2, train_rows, folder, make_rows(), recipe)[0], reference)


def test_reference_learns(reference):
    assert reference.losses[-1] < reference.losses[0] - 0.1
    assert reference.norms[0] > 0.1
