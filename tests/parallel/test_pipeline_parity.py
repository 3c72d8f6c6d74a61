"""Invariant: a pipeline changes no number, whatever its schedule, its stages and what is inside them."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import write_tiny_model
from support.pipelines import joined, train_stages
from support.training import Outcome, Recipe, largest_relative_difference, make_rows, train_rows

TOLERANCE = 1e-5
TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipeline")
    return {
        "tied": write_tiny_model(root / "tied", "parity_dense"),
        "untied": write_tiny_model(root / "untied", "parity_dense", tie_word_embeddings=False),
        "moe": write_tiny_model(root / "moe", "parity_moe"),
    }


@pytest.fixture(scope="module")
def reference(ranks, folders):
    known: dict[str, Outcome] = {}

    def of(family: str) -> Outcome:
        if family not in known:
            recipe = Recipe(training=TRAINING)
            known[family] = ranks.run(1, train_rows, folders[family], make_rows(), recipe)[0]
        return known[family]

    return of


def assert_same(ours: Outcome, reference: Outcome) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


def case(world: int, family: str, accumulation: int, *, soak: bool = False, **parallel: object):
    words = [f"{key}={value}" for key, value in parallel.items()]
    name = f"{world} ranks, {family}, {accumulation} micro-batches, {' '.join(words)}"
    marks = pytest.mark.soak if soak else ()
    return pytest.param(world, family, accumulation, {"pp_size": 2, **parallel}, id=name, marks=marks)


INTERLEAVED: dict[str, Any] = {"pp_schedule": "interleaved_1f1b"}
CASES = [
    case(2, "tied", 4, recompute=True),
    case(2, "untied", 5, **INTERLEAVED),
    case(2, "untied", 4, soak=True, pp_schedule="gpipe"),
    case(4, "tied", 2, soak=True, **INTERLEAVED),
    case(4, "moe", 4, soak=True, ep_size=2, recompute=True),
    case(4, "tied", 2, soak=True, tp_size=2),
    case(2, "tied", 1, soak=True),
    case(2, "moe", 2, soak=True),
    case(2, "moe", 4, soak=True, recompute=True, **INTERLEAVED),
    case(2, "tied", 4, soak=True, cpu_offload=True),
    case(2, "untied", 4, soak=True, reshard_after_forward=False),
    case(2, "untied", 4, soak=True, pp_layers_per_stage=(3, 1)),
    case(4, "untied", 2, soak=True, pp_schedule="gpipe"),
    case(
        4, "tied", 4, soak=True, recompute=True, ignored_modules=["model.layers.{*}.self_attn", "model.norm"]
    ),
    case(4, "tied", 4, soak=True, pp_size=4),
    case(4, "untied", 2, soak=True, pp_size=4, pp_schedule="gpipe"),
    case(4, "moe", 4, soak=True, tp_size=2, **INTERLEAVED),
    case(4, "moe", 4, soak=True, tp_size=2, ep_size=2),
    case(4, "tied", 4, soak=True, cp_size=2, cp_type="ring"),
    case(4, "tied", 4, soak=True, cp_size=2, cp_type="ulysses", **INTERLEAVED),
    case(8, "tied", 2, soak=True, fsdp_size=2),
    case(8, "tied", 4, soak=True, tp_size=2, recompute=True),
]
"""The parity matrix has each axis inside a stage once in its own quick sample."""


@pytest.mark.parametrize(("world", "family", "accumulation", "parallel"), CASES)
def test_pipeline_changes_nothing(ranks, folders, reference, world, family, accumulation, parallel):
    recipe = Recipe(accumulation=accumulation, parallel=parallel, training=TRAINING)
    parts = ranks.run(world, train_stages, folders[family], make_rows(), recipe)
    assert_same(joined(parts), reference(family))


@pytest.mark.soak
@pytest.mark.parametrize("counts", [(1, 2), (2, 1)], ids=["dense layer alone", "last layer alone"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_families_change_nothing_in_a_pipeline(ranks, tmp_path, family, counts):
    """Three layers; where the first is dense, a stage of it alone has no experts."""
    types: dict[str, dict[str, Any]] = {
        "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    }
    folder = write_tiny_model(tmp_path / family, family, num_hidden_layers=3, **types.get(family, {}))
    one = ranks.run(1, train_rows, folder, make_rows(), Recipe(training=TRAINING))[0]
    parallel = {"pp_size": 2, "pp_layers_per_stage": counts, "ep_size": 2}
    recipe = Recipe(accumulation=4, parallel=parallel, training=TRAINING)
    assert_same(joined(ranks.run(4, train_stages, folder, make_rows(), recipe)), one)
