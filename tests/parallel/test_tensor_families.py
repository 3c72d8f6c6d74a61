"""Every parameter's gradient under tensor parallelism, against the library's own model on one process."""

from __future__ import annotations

import pytest
from parallel.tensor_models import CASES, reference_gradients, split_gradients, uneven_rows, write_model
from support.training import largest_relative_difference


@pytest.mark.parametrize("case", CASES)
def test_tp2(case, tmp_path, ranks):
    folder = write_model(tmp_path / "model", case)
    rows = uneven_rows()
    loss, reference = reference_gradients(folder, rows)
    for ours, gradients in ranks.run(2, split_gradients, folder, rows, tp_size=2):
        assert ours == pytest.approx(loss, rel=1e-6)
        assert largest_relative_difference(gradients, reference) < 1e-5
