"""How a run goes on from a checkpoint: what is restored, what must be the same, what may differ and is
said.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint import CheckpointStore
from shardyard.config import TrainingConfig
from shardyard.errors import UserError
from shardyard.models import BuiltModel
from shardyard.train.state import RunState

logger = logging.getLogger("shardyard.train")


def restore(
    store: CheckpointStore,
    path: str,
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    order: str,
    settings: dict[str, Any],
) -> RunState:
    """The state to go on from, weights and optimizer read; a new one without ``path`` or from weights."""
    if not path:
        return RunState(order)
    restored = store.load(Path(path), model=built.model, optimizer=optimizer)
    state = RunState.from_json(restored.run_state)
    if not restored.has_optimizer:
        if store.folder.resolve() == Path(path).resolve().parent:
            raise UserError(
                f"training.resume_from_checkpoint: {path} holds weights only (training.save_only_model), so "
                f"training "
                "starts from step 0; name another training.output_dir, this one holds the steps so far"
            )
        logger.info("Loaded model weights only, starting training from step 0")
        return RunState(order)
    if state.data_order != order:
        before, now = state.data_order.split(", "), order.split(", ")
        was, is_now = (
            [part for part in ours if part not in other] for ours, other in ((before, now), (now, before))
        )
        raise UserError(
            f"training.resume_from_checkpoint: {path} counts its place in other data: it had "
            f"{', '.join(was) or 'less'}, this run has {', '.join(is_now) or 'less'}. Resume with the data, "
            "data "
            "settings and seed of the checkpoint; to train on other data, start a new run from the exported "
            "model."
        )
    logger.info("Load distributed checkpoint from %s successfully!", path)
    logger.info("Resuming from step %d, after %d samples", state.step, state.consumed_samples)
    _tell_changes(restored.run_state.get("settings", {}), settings)
    return state


TOLD_WHEN_CHANGED = (
    "lr", "min_lr", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm",
    "adam_beta1", "adam_beta2", "adam_epsilon", "num_train_epochs", "max_steps", "dataloader_drop_last",
    "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def training_settings(training: TrainingConfig) -> dict[str, Any]:
    return {name: getattr(training, name) for name in TOLD_WHEN_CHANGED}


def _tell_changes(before: dict[str, Any], settings: dict[str, Any]) -> None:
    """The settings of this run win over those of the checkpoint; each difference is said."""
    for name, old in before.items():
        if name in settings and settings[name] != old:
            logger.warning(
                "resuming with %s %s; the checkpoint was written with %s", name, settings[name], old
            )
    if before.get("global_batch", settings["global_batch"]) != settings["global_batch"]:
        logger.warning(
            "the global batch is %d samples and was %d: the steps ahead differ from those of the unbroken "
            "run; to keep it, make per_device_train_batch_size x gradient_accumulation_steps x "
            "data-parallel ranks the same",
            settings["global_batch"], before["global_batch"],
        )  # fmt: skip
