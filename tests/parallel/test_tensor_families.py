"""Every parameter's gradient under tensor parallelism, against the library's own model on one process.

Rows of unequal length, few labels, two accumulated micro-batches of 53 and 47 tokens (or four), which tp does
not divide; tp ranks hold stretches without a label. `largest_relative_difference` looks at each tensor by
itself, norms and biases too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parallel.tensor_models import CASES, reference_gradients, split_gradients, uneven_rows, write_model
from support.training import largest_relative_difference

LAYOUTS = {
    "tp2": (2, dict(tp_size=2)),
    "tp4": (4, dict(tp_size=4)),
    "fsdp2 x tp2": (4, dict(tp_size=2, fsdp_size=2)),
    "hsdp2 x tp2": (4, dict(tp_size=2, fsdp_size=1)),
    "tp2 recompute": (2, dict(tp_size=2, recompute="full")),
}
QUICK = {
    ("qwen3", "tp2"),
    ("llama_tied", "fsdp2 x tp2"),
    ("deepseek_v3", "tp2 recompute"),
    ("gpt_oss", "tp2"),
    ("starcoder2", "tp4"),
}


def cells() -> list[object]:
    every = [(case, layout) for case in CASES for layout in LAYOUTS]
    marks = {cell: () if cell in QUICK else (pytest.mark.soak,) for cell in every}
    return [pytest.param(*cell, marks=marks[cell], id=f"{cell[0]}, {cell[1]}") for cell in every]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """case -> (folder, loss, gradients), each made once."""
    made: dict[str, tuple[Path, float, dict[str, np.ndarray]]] = {}

    def of(case: str) -> tuple[Path, float, dict[str, np.ndarray]]:
        if case not in made:
            folder = write_model(tmp_path_factory.mktemp(case), case)
            made[case] = (folder, *reference_gradients(folder, uneven_rows()))
        return made[case]

    return of


@pytest.mark.parametrize(("case", "layout"), cells())
def test_every_gradient_equals_that_of_one_process(case, layout, references, ranks):
    folder, loss, reference = references(case)
    world, options = LAYOUTS[layout]
    for ours, gradients in ranks.run(world, split_gradients, folder, uneven_rows(), **options):
        assert ours == pytest.approx(loss, rel=1e-6)
        assert largest_relative_difference(gradients, reference) < 1e-5


def test_each_norm_has_its_gradient_once_however_many_micro_batches_accumulate(references, ranks):
    """The library's own style sums the accumulated gradient again with every micro-batch."""
    folder, _, reference = references("qwen3")
    norms = {name for name in reference if "norm" in name}
    assert len(norms) == 2 * 4 + 1, "of each layer its two, those of queries and keys, and the last"
    results = ranks.run(2, split_gradients, folder, uneven_rows(), 4, tp_size=2)
    for _, gradients in results:
        for name in norms:
            scale = np.abs(reference[name]).max()
            np.testing.assert_allclose(
                gradients[name], reference[name], rtol=0, atol=1e-5 * scale, err_msg=name
            )


def test_every_measured_family_is_measured_here():
    from parallel.tensor_models import tensor_config

    from shardyard.config.families import SPLIT

    assert {tensor_config(case).model_type for case in CASES} == SPLIT
