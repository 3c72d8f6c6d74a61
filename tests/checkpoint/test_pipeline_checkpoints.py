"""Checkpoints and exports of a pipeline: each rank holds some of the names, the files hold them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, make_rows

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}
ONE = Recipe(accumulation=4, training=TRAINING)


def pipeline(**parallel: Any) -> Recipe:
    return Recipe(accumulation=4, training=TRAINING, parallel={"pp_size": 2, **parallel})


def go_on(
    model: Path,
    recipe: Recipe,
    steps: tuple[int, int],
    *,
    load: Path | None = None,
    save: Path | None = None,
    export: Path | None = None,
) -> list[float]:
    """Updates ``steps[0]`` to ``steps[1]`` on the ranks of the group; their losses."""
    from support.training import build_step, micro_batches_of

    from shardyard.checkpoint import CheckpointStore, check_exportable, export_hf

    built, step, meshes = build_step(model, recipe)
    batches = micro_batches_of(make_rows(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    if load is not None:
        store = CheckpointStore(load, save_total_limit=None)
        found = store.latest()
        assert found is not None
        assert store.load(found, model=built.model, optimizer=step.optimizer).has_optimizer
    check_exportable(built.model, source_dir=model, tokenizer=None)
    losses = [step(batches, step=k, lr=1e-2).loss for k in range(steps[0], steps[1] + 1)]
    if save is not None:
        store = CheckpointStore(save, save_total_limit=None)
        store.save(steps[1], model=built.model, optimizer=step.optimizer, run_state={"step": steps[1]})
    if export is not None:
        export_hf(built.model, out_dir=export, source_dir=model, tokenizer=None)
    return losses


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def assert_close(ours: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = np.abs(ours[name].astype(np.float64) - tensor).max()
        assert difference <= 1e-5 * np.abs(tensor).max(), name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(root / "tied", "parity_dense"),
        # The first of three layers is dense: with one layer, the first stage has no experts.
        "experts": write_tiny_model(root / "experts", "deepseek_v3"),
    }


@pytest.fixture(scope="module")
def unbroken(ranks, models, tmp_path_factory):
    """Four updates of one process, its losses and exported weights."""
    known: dict[str, tuple[list[float], dict[str, np.ndarray]]] = {}

    def of(model: str) -> tuple[list[float], dict[str, np.ndarray]]:
        if model not in known:
            out = tmp_path_factory.mktemp("unbroken")
            losses = ranks.run(1, go_on, models[model], ONE, (1, 4), export=out)[0]
            known[model] = losses, tensors_of(out)
        return known[model]

    return of


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param("tied", (2, pipeline()), (1, ONE), id="tied, from a pipeline to one process"),
        pytest.param(
            "experts", (2, pipeline(pp_layers_per_stage=(1, 2))), (2, pipeline(pp_layers_per_stage=(2, 1))),
            id="experts, to other stages",
        ),
        pytest.param(
            "tied", (1, ONE), (2, pipeline()), id="tied, from one process to a pipeline",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "experts", (4, pipeline(pp_layers_per_stage=(1, 2), ep_size=2)),
            (4, pipeline(pp_layers_per_stage=(2, 1))),
            id="experts, to other stages and owners", marks=pytest.mark.soak,
        ),
        pytest.param(
            "tied", (2, pipeline(pp_schedule="interleaved_1f1b")), (4, pipeline(pp_size=4)),
            id="tied, from interleaved stages to four ranks", marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_another_pipeline(ranks, models, unbroken, tmp_path, model, before, after):
    """Two updates in one layout, two in another: the losses and the exported weights of one process."""
    first = ranks.run(before[0], go_on, models[model], before[1], (1, 2), save=tmp_path)[0]
    then = ranks.run(after[0], go_on, models[model], after[1], (3, 4), load=tmp_path, export=tmp_path / "hf")[
        0
    ]
    losses, weights = unbroken(model)
    assert [*first, *then] == pytest.approx(losses, rel=1e-5)
    assert_close(tensors_of(tmp_path / "hf"), weights)


def test_a_resumed_pipeline_is_the_unbroken_one_bit_for_bit(ranks, models, tmp_path):
    recipe = pipeline()
    ranks.run(2, go_on, models["tied"], recipe, (1, 3), export=tmp_path / "whole")
    ranks.run(2, go_on, models["tied"], recipe, (1, 2), save=tmp_path / "run")
    ranks.run(2, go_on, models["tied"], recipe, (3, 3), load=tmp_path / "run", export=tmp_path / "resumed")
    whole, resumed = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(resumed[name], tensor, err_msg=name)


@pytest.mark.parametrize("model", ["tied", pytest.param("experts", marks=pytest.mark.soak)])
def test_an_untouched_export_is_its_source_bit_for_bit(ranks, models, tmp_path, model):
    """Names, values and the absence of the tied head, from a rank that holds half of them."""
    recipe = pipeline(pp_layers_per_stage=(1, 2) if model == "experts" else None)
    ranks.run(2, go_on, models[model], recipe, (1, 0), export=tmp_path / model)
    ours, wanted = tensors_of(tmp_path / model), tensors_of(models[model])
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def load_into_other_model(model: Path, recipe: Recipe, saved: Path) -> str:
    from support.training import build_step

    from shardyard.checkpoint import CheckpointStore
    from shardyard.errors import UserError

    built, step, _ = build_step(model, recipe)
    store = CheckpointStore(saved, save_total_limit=None)
    found = store.latest()
    assert found is not None
    try:
        store.load(found, model=built.model, optimizer=step.optimizer)
    except UserError as error:
        return str(error)
    return "loaded"


def test_a_tensor_that_no_stage_has_is_missed_on_every_rank(ranks, models, tmp_path):
    """The comparison of names is that of all ranks together: a shorter model's lack is found."""
    shorter = write_tiny_model(
        tmp_path / "shorter", "parity_dense", num_hidden_layers=3, layer_types=["full_attention"] * 3
    )
    ranks.run(1, go_on, shorter, ONE, (1, 1), save=tmp_path / "run")
    messages = ranks.run(2, load_into_other_model, models["tied"], pipeline(), tmp_path / "run")
    assert messages[0] == messages[1]
    assert "missing (such as model.model.layers.3." in messages[0]
