"""Legs of a run that saves and goes on, for optimizers whose state is not in fp32."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.training import Recipe, build_step, make_rows, micro_batches_of, whole_model

TORCHAO = Path(__file__).parents[2] / ".venv" / "torchao"
"""Where `make setup-test` puts torchao, which would slow down whatever imports transformers beside it."""

TIMEOUT_S = 400.0
"""Several legs in one call, on a machine that may be busy."""


@dataclass(frozen=True)
class Leg:
    losses: list[float]
    weights: dict[str, np.ndarray]
    state_bytes: int
    """Of this rank's optimizer state, by the storages behind it."""


def leg_of_a_run(folder: Path, recipe: Recipe, out: Path, first: int, last: int) -> Leg:
    """Steps ``first`` to ``last`` at ``training.lr`` (0.01), from the checkpoint of the step before; saves at
    the end.
    """
    from support.live_memory import bytes_kept

    from shardyard.checkpoint import CheckpointStore

    built, step, meshes = build_step(folder, recipe)
    store = CheckpointStore(out, save_total_limit=None)
    if first > 1:
        path = store.folder / f"global_step_{first - 1}"
        store.load(path, model=built.model, optimizer=step.optimizer)
    count = recipe.accumulation * recipe.parallel.get("pp_size", 1)
    batches = micro_batches_of(make_rows(), count, meshes.dp_rank, meshes.dp_size)
    lr = recipe.training.get("lr", 1e-2)
    losses = [step(batches, step=number, lr=lr).loss for number in range(first, last + 1)]
    store.save(last, model=built.model, optimizer=step.optimizer, run_state={})
    states = [t for state in step.optimizer.state.values() for t in state.values() if t.ndim]
    weights = whole_model(dict(built.model.named_parameters()))
    return Leg(losses, weights, bytes_kept(plain for t in states for plain in parts_of(t)))


def unbroken_and_resumed(folder: Path, recipe: Recipe, out: Path) -> tuple[Leg, Leg]:
    """Four steps, and the last two of them after a save and a load; the save of step 2 stays in
    ``out/broken``.
    """
    unbroken = leg_of_a_run(folder, recipe, out / "unbroken", 1, 4)
    leg_of_a_run(folder, recipe, out / "broken", 1, 2)
    return unbroken, leg_of_a_run(folder, recipe, out / "broken", 3, 4)


def add_torchao() -> None:
    """Let this process, a rank of the pool, import it."""
    if not TORCHAO.is_dir():
        raise FileNotFoundError(f"{TORCHAO} is not there: run `make setup-test`")
    sys.path.append(str(TORCHAO))


def parts_of(tensor: Any) -> list[Any]:
    """The plain tensors that a tensor of this rank is made of."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(own):
        return [own]
    return [getattr(own, name) for name in own.__tensor_flatten__()[0]]
