"""Micro-batches by tokens and by length on real ranks: the numbers of one process, whatever the layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.models import write_tiny_model
from support.parity import CELLS, Cell, write_parity_model
from support.training import Outcome, Recipe, build_step, largest_relative_difference, make_rows, samples_of
from support.validation import eval_rows

TOLERANCE = 1e-5
TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}
ROWS = make_rows(18, empty=4)
LONGEST = max(len(ids) for ids, _ in ROWS)
CUTS: dict[str, dict[str, Any]] = {
    "tokens": {"rows": 8, "max_tokens": LONGEST + 5},
    "shorter than a row": {"rows": 8, "max_tokens": LONGEST - 3},
    "length": {"rows": 3, "by_length": True},
}
SAMPLE = {("PP 2", "dense", "tokens"), ("CP ring 2", "dense", "length")}
CASES = [(cell, family, cut) for cell in CELLS for family in cell.families for cut in CUTS]


def cut_rows(rows: Any, options: dict[str, Any], dp_rank: int, dp_size: int) -> list[Any]:
    """This rank's micro-batches of all rows, as the loader makes them."""
    from shardyard.data.batches import collate
    from shardyard.data.cut import Cut
    from shardyard.data.order import Units

    samples = samples_of(rows)
    units = Units.singles(np.arange(len(samples)))
    cut = Cut(**{"even_at": 50, **options})
    share = cut.share(units, lambda unit: samples[unit[0]].doc_lens, dp_rank=dp_rank, dp_size=dp_size)
    numbers = [[index for unit in part for index in unit] for part in share]
    return [collate([samples[index] for index in part], part, 0) for part in numbers]


def train_cut(folder: Path, recipe: Recipe, options: dict[str, Any]) -> Outcome | None:
    """As `train_rows`, in micro-batches of our own."""
    from support import training

    def batches(rows: Any, _: int, dp_rank: int, dp_size: int) -> list[Any]:
        return cut_rows(rows, options, dp_rank, dp_size)

    with mock.patch.object(training, "micro_batches_of", batches):
        return training.train_rows(folder, ROWS, recipe)


def assert_same(ours: Outcome, reference: Outcome) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cuts")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def references(ranks: Any, folders: dict[str, Path]) -> Any:
    from support.training import train_rows

    found: dict[str, Outcome] = {}

    def reference(family: str) -> Outcome:
        if family not in found:
            recipe = Recipe(steps=1, training=TRAINING)
            found[family] = ranks.run(1, train_rows, folders[family], ROWS, recipe)[0]
        return found[family]

    return reference


@pytest.mark.parametrize(
    ("cell", "family", "cut"),
    [
        pytest.param(
            cell, family, cut, id=f"{cell.name}-{family}-{cut}",
            marks=() if (cell.name, family, cut) in SAMPLE else pytest.mark.soak,
        )
        for cell, family, cut in CASES
    ],
)  # fmt: skip
def test_a_cut_changes_nothing_on_any_layout(
    ranks: Any, folders: dict[str, Path], references: Any, cell: Cell, family: str, cut: str
) -> None:
    parallel = cell.parallel | {"recompute": True, "cpu_offload": cell.name == "FSDP 4"}
    recipe = Recipe(steps=1, training=TRAINING, parallel=parallel)
    options = CUTS[cut] | {"at_least": cell.stages}
    assert_same(ranks.run(cell.world, train_cut, folders[family], recipe, options)[0], references(family))


def test_the_cuts_of_these_tests_are_of_unequal_numbers_of_rows() -> None:
    """A row of none but its own tokens, fillers, and numbers of rows that ranks do not share."""
    parts = {name: [cut_rows(ROWS, options, rank, 4) for rank in range(4)] for name, options in CUTS.items()}
    for share in parts["tokens"]:
        assert all(batch.num_tokens <= LONGEST + 5 for batch in share)
    assert len({len(batch.sample_ids) for share in parts["tokens"] for batch in share}) > 1
    over = [b for share in parts["shorter than a row"] for b in share if b.num_tokens > LONGEST - 3]
    assert over and all(len(batch.sample_ids) == 1 for batch in over)
    assert sorted(sum(len(b.sample_ids) for b in share) for share in parts["length"]) == [4, 4, 5, 5]


@pytest.mark.parametrize(
    "cut",
    [{"rows": 8, "max_tokens": 60}, pytest.param({"rows": 3, "by_length": True}, marks=pytest.mark.soak)],
    ids=str,
)
def test_one_document_per_forward_changes_nothing(
    ranks: Any, folders: dict[str, Path], references: Any, cut: dict[str, Any]
) -> None:
    recipe = Recipe(steps=1, training=TRAINING, packed=False)
    assert_same(
        ranks.run(2, train_cut, folders["dense"], recipe, cut | {"alone": True})[0], references("dense")
    )


def losses_of_sets(folder: Path, cuts: list[dict[str, Any] | None], parallel: dict[str, Any]) -> list[float]:
    """The validation loss of one set, cut in each way."""
    from shardyard.data.cut import Cut
    from shardyard.data.eval_sets import EvalSet
    from shardyard.evaluate.evaluator import Evaluator

    built, step, meshes = build_step(folder, Recipe(parallel=parallel))
    sets = [EvalSet("held out", samples_of(eval_rows(9)))]
    evaluators = [
        Evaluator(
            built.model, step.group, step.device, sets, meshes=meshes, per_device=4, packed=True,
            cut=None if options is None else Cut(**options),
        )
        for options in cuts
    ]  # fmt: skip
    return [evaluator.evaluate().total.loss for evaluator in evaluators]


@pytest.mark.parametrize(
    ("world", "parallel"), [(2, {}), pytest.param(4, {"pp_size": 2}, marks=pytest.mark.soak)]
)
def test_validation_by_tokens_has_the_same_loss(
    ranks: Any, tmp_path: Path, world: int, parallel: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    cuts = [None, {"rows": 4, "max_tokens": 70}, {"rows": 4, "max_tokens": 8}, {"rows": 2, "by_length": True}]
    results = ranks.run(world, losses_of_sets, folder, cuts, parallel)
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx([results[0][0]] * 4, rel=1e-6) and math.isfinite(results[0][0])
