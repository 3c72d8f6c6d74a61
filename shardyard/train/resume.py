"""How a run goes on from a checkpoint: what is restored, what must be the same, what may differ and is
said.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from shardyard.checkpoint import CheckpointStore, Restored
from shardyard.checkpoint.reference import is_reference, read_reference
from shardyard.data.sampler import Sampler
from shardyard.errors import UserError
from shardyard.models import BuiltModel
from shardyard.train.differences import RunFacts, data_differences, tell_differences
from shardyard.train.state import RunState

logger = logging.getLogger("shardyard.train")


def restore(
    store: CheckpointStore,
    path: str,
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    order: str,
    facts: RunFacts,
    *,
    force: bool = False,
    latest: bool = False,
    sampler: Sampler | None = None,
) -> tuple[RunState, RunFacts | None]:
    """The state to go on from, weights and optimizer read, and the facts of the run that wrote it; a new
    state and None without ``path`` or from weights alone. With ``latest`` a checkpoint whose content is
    damaged gives way to the one before. The place in the data after the updates of a checkpoint of the
    reference is that of ``sampler``.

    Raises:
        UserError: the checkpoint cannot be read, or counts its place in other data and ``force`` is false.
    """
    if not path:
        return RunState(order), None
    if store.peers.first("training.resume_from_checkpoint", lambda: is_reference(Path(path))):
        return _from_reference(store, path, built, optimizer, order, sampler), None
    restored = _read(store, path, built, optimizer, latest=latest)
    path = str(restored.path)
    state = RunState.from_json(restored.run_state)
    if not restored.has_optimizer:
        return _with_weights_alone(store, path, order), None
    before = RunFacts.from_json(restored.run_state.get("settings", {}))
    if state.data_order != order:
        old, new = state.data_order.split(", "), order.split(", ")
        was, is_now = (
            [part for part in ours if part not in other] for ours, other in ((old, new), (new, old))
        )
        what = (
            f"{path} counts its place in other data: it had {', '.join(was) or 'less'}, this run has "
            f"{', '.join(is_now) or 'less'}"
        )
        if changed := data_differences(before, facts):
            what += f" ({'; '.join(changed)})"
        if not force:
            raise UserError(
                f"training.resume_from_checkpoint: {what}. Resume with the data, data settings and seed of "
                "the checkpoint; to train on other data, start a new run from the exported model, or set "
                "training.resume_force: true to go on at the same count of samples in the new order."
            )
        logger.warning("%s; training.resume_force: it goes on at the same count, %d", what, state.cursor)
        state = replace(state, data_order=order)
    logger.info("Load distributed checkpoint from %s successfully!", path)
    logger.info("Resuming from step %d, after %d samples", state.step, state.consumed_samples)
    tell_differences(before, facts)
    return state, before


def _with_weights_alone(store: CheckpointStore, path: str, order: str) -> RunState:
    if store.folder.resolve() == Path(path).resolve().parent:
        raise UserError(
            f"training.resume_from_checkpoint: {path} holds weights only (training.save_only_model), so "
            "training starts from step 0; name another training.output_dir, this one holds the steps so far"
        )
    logger.info("Loaded model weights only, starting training from step 0")
    return RunState(order)


def _from_reference(
    store: CheckpointStore,
    path: str,
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    order: str,
    sampler: Sampler | None,
) -> RunState:
    """The state after as many updates of this run as the reference's had made."""
    if sampler is None:
        raise ValueError("the place in the data after a checkpoint of the reference takes a sampler")
    found = read_reference(Path(path), store.peers, model=built.model, optimizer=optimizer)
    logger.info("Load distributed checkpoint from %s successfully!", path)
    if not found.has_optimizer:
        return _with_weights_alone(store, path, order)
    # A stream makes all its windows on the way: one rank does.
    what = f"training.resume_from_checkpoint: {path}"
    cursor, units = store.peers.first(what, lambda: _place_after(what, found.step, sampler))
    logger.warning(
        "%s is the reference's, whose order of the data cannot be repeated: from step %d on the samples are "
        "those that this run's own order holds after %d updates, and the learning rate is that of this run's "
        "schedule", path, found.step + 1, found.step,
    )  # fmt: skip
    logger.info("Resuming from step %d, after %d samples", found.step, units)
    return RunState(order, step=found.step, cursor=cursor, consumed_samples=units)


def _place_after(what: str, steps: int, sampler: Sampler) -> tuple[int, int]:
    """The cursor after so many updates, and how many units they took.

    Raises:
        UserError: this run has fewer updates.
    """
    if steps > (total := sampler.last_step(cursor=0, step=0)):
        raise UserError(
            f"{what} has made {steps} updates, and this run, with {sampler.global_batch} samples in a step, "
            f"ends after {total}; raise training.num_train_epochs or training.max_steps"
        )
    cursor = units = 0
    for _ in range(steps):
        batch = sampler.global_batch_at(cursor)
        cursor, units = batch.end, units + len(batch.units)
    return cursor, units


def _read(
    store: CheckpointStore, path: str, built: BuiltModel, optimizer: torch.optim.Optimizer, *, latest: bool
) -> Restored:
    if not latest:
        return store.load(Path(path), model=built.model, optimizer=optimizer)
    restored = store.load_latest(model=built.model, optimizer=optimizer)
    if restored is None:
        raise UserError(
            f"training.resume_from_checkpoint: latest, but no checkpoint in {store.folder} is as it was "
            "written (`shardyard checkpoint verify` tells more); move the folder away to start at step 0"
        )
    return restored
