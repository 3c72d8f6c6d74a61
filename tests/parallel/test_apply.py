"""Module lists of any shape give the same training, or a clear refusal."""

from __future__ import annotations

import pytest
from support.models import write_tiny_model
from support.training import Recipe, largest_relative_difference, make_rows, train_rows

TRAINING = {"adam_epsilon": 1e-4}
LISTS = {
    "nothing but the root": {"fsdp_modules": ["lm_head"]},
    "a list that also matches a container": {"fsdp_modules": ["model.layers*"]},
    "everything": {"fsdp_modules": ["*"]},
    "nested": {"fsdp_modules": ["model.layers.{*}", "model.layers.{*}.mlp", "model"]},
    "ignored inside": {"ignored_modules": ["model.layers.{0-0}.mlp", "model.norm"]},
    "ignored tied pair": {"ignored_modules": ["model.embed_tokens"]},
    "ignored tied pair by its other name": {"ignored_modules": ["lm_head"]},
    "ignored around": {"ignored_modules": ["model.layers.{*}"]},
    "everything ignored": {"ignored_modules": ["model", "lm_head"]},
    "recompute a container's parts": {"recompute": True, "recompute_modules": ["model.layers*"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tied"), "qwen3_tied")


@pytest.fixture(scope="module")
def reference(ranks, folder):
    return ranks.run(1, train_rows, folder, make_rows(), Recipe(training=TRAINING, steps=2))[0]


@pytest.mark.parametrize("name", LISTS)
def test_any_list_of_modules_gives_the_same_training(ranks, folder, reference, name):
    recipe = Recipe(accumulation=2, training=TRAINING, parallel=LISTS[name], steps=2)
    ours = ranks.run(2, train_rows, folder, make_rows(), recipe)[0]
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-5)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= 1e-5
    assert largest_relative_difference(ours.weights, reference.weights) <= 1e-5
