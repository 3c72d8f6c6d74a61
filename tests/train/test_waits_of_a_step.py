"""How often a step waits for its device."""

from __future__ import annotations

import pytest
import torch
from support.training import Recipe, make_rows

from shardyard.device import read_back


def waits(folder, parallel, accumulation):
    """Reads of device tensors in a step, by name, with the loss of balance on."""
    from support.training import build_step, micro_batches_of
    from support.waits import Waits

    from shardyard.parallel import local
    from shardyard.train import step as steps

    built, step, meshes = build_step(
        folder, Recipe(parallel=parallel, training={"router_aux_loss_coef": 0.01})
    )
    batches = micro_batches_of(make_rows(), accumulation, meshes.dp_rank, meshes.dp_size)
    result = step(batches, step=1, lr=1e-2)
    watch = Waits([local(p).detach() for p in built.model.parameters()])
    whole = steps.forward_parts

    def on_device(*args, **kwargs):
        parts = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in part.items()}
            for part in whole(*args, **kwargs)
        ]
        watch._mark(parts)
        return parts

    steps.forward_parts = on_device
    with watch:
        again = step(batches, step=2, lr=1e-2)
    assert result.routing is not None and again.routing is not None and again.routing.max_load >= 1
    return dict(watch.counts)


def test_a_step_reads_its_results_once(ranks, model_zoo):
    """Losses, norms and the experts' load come together. Each forward asks where its labels are."""
    counts = ranks.run(1, waits, model_zoo.folder("parity_moe"), {}, 3)[0]
    assert counts == {"cpu": 1, "aten::nonzero": 3}


def test_values_of_all_types_come_as_they_are():
    tensors = [
        torch.arange(5), torch.tensor(1.5), torch.tensor([[True, False]]), torch.zeros(0),
        torch.randn(3, 4).t(), torch.tensor([1e-7, 2.0], dtype=torch.bfloat16),
    ]  # fmt: skip
    found = read_back(tensors)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(found, tensors, strict=True)
    )
    assert read_back([]) == []


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [{}, {"fsdp_size": 2}, {"tp_size": 2}])
def test_layouts_read_no_more(ranks, model_zoo, parallel):
    counts = ranks.run(2, waits, model_zoo.folder("parity_moe"), parallel, 2)[0]
    assert counts["cpu"] == 1 and "aten::_local_scalar_dense" not in counts
