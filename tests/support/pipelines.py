"""Training on a pipeline: each rank tells what its stages hold, and the parts make the model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.training import Outcome, Recipe, build_step, micro_batches_of, whole


def train_stages(folder: Path, rows: Any, recipe: Recipe) -> Outcome:
    """Run on every rank, which returns the losses and norms, and gradients and weights of its own stages."""
    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(rows, recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    counts = step._agree(batches)
    step.device.seed(0)
    if step.routing is not None:
        step.routing.begin_step(counts.tokens)
    step._forward_backward(batches, counts)
    grads = whole({n: p.grad for n, p in built.model.named_parameters() if p.grad is not None})
    step.optimizer.zero_grad(set_to_none=True)
    if step.routing is not None:
        step.routing.finish_step(applied=False)
    results = [step(batches, step=k, lr=1e-2) for k in range(1, recipe.steps + 1)]
    weights = whole(dict(built.model.named_parameters()))
    return Outcome([r.loss for r in results], [r.grad_norm for r in results], grads, weights)


def joined(parts: list[Outcome]) -> Outcome:
    """One outcome of all ranks: they agree on the numbers, and on every tensor that several of them hold."""
    for part in parts[1:]:
        assert (part.losses, part.norms) == (parts[0].losses, parts[0].norms)
    return Outcome(
        parts[0].losses,
        parts[0].norms,
        _united([part.first_grads for part in parts]),
        _united([part.weights for part in parts]),
    )


def _united(shares: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    together: dict[str, np.ndarray] = {}
    for share in shares:
        for name, tensor in share.items():
            np.testing.assert_array_equal(together.setdefault(name, tensor), tensor, err_msg=name)
    return together
