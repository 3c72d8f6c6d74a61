"""When a run saves and exports, and what becomes of it when it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint import CheckpointStore
from shardyard.config import TrainingConfig
from shardyard.data.sampler import Sampler
from shardyard.data.types import StepBatch
from shardyard.errors import UserError
from shardyard.train.state import RunState

logger = logging.getLogger("shardyard.train")


@dataclass
class Saver:
    """The saves of a run. Every rank calls every method, at the same steps."""

    store: CheckpointStore
    training: TrainingConfig
    sampler: Sampler
    model: Any
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]
    """What a resumed run compares its own settings with."""
    saved_at: int
    """The step of the newest save, or of the checkpoint that the run went on from."""
    assets: Callable[[Path], None] | None = None
    """Writes what a checkpoint needs besides weights to be used alone: config, tokenizer."""
    export: Callable[[Path], None] | None = None
    """Exports the model into a folder."""
    lost: set[int] = field(default_factory=set)
    """Steps whose save has failed; who keeps word of them takes note and removes them."""

    @property
    def saves_at_all(self) -> bool:
        return self.training.save_steps > 0 or self.training.save_epochs > 0

    def is_due(self, step: int, batch: StepBatch) -> bool:
        """Whether ``step``, which ended ``batch``, is to be saved and is not yet."""
        if self.saved_at == step:
            return False
        steps, epochs = self.training.save_steps, self.training.save_epochs
        if steps > 0 and step % steps == 0:
            return True
        return epochs > 0 and self.sampler.ends_epoch(batch.end) and (batch.epoch + 1) % epochs == 0

    def save(self, state: RunState, *, best: bool = False, whole: bool = False) -> bool:
        """Write a checkpoint of ``state``, and its export if one is due. Whether it was written, or, with
        ``save_async``, is being written. A ``whole`` one has the optimizer's state in any case.

        Raises:
            UserError: it cannot be written, and ``training.on_save_error`` is stop.
        """
        self.settle()
        started = time.perf_counter()
        in_background = self.training.save_async
        weights_only = self.training.save_only_model and not whole
        try:
            path = self.store.save(
                state.step,
                model=self.model,
                optimizer=None if weights_only else self.optimizer,
                run_state={**state.to_json(), "settings": self.settings},
                best=best,
                assets=self.assets,
                wait=not in_background,
            )
        except UserError as error:
            self._failed(error, state.step)
            return False
        self.saved_at = state.step
        elapsed = time.perf_counter() - started
        if in_background:
            logger.info("Saving checkpoint %s while training goes on (%.1f s to copy)", path, elapsed)
        else:
            logger.info("Saved checkpoint to %s (%.1f s)", path, elapsed)
        return self._export(state.step, path)

    @property
    def is_over(self) -> bool:
        """Whether a save beside the training has ended on this rank, and waits to be settled; asks nobody."""
        return self.store.poll() in ("finished", "failed")

    def settle(self) -> None:
        """Wait for a save that is under way.

        Raises:
            UserError: it failed, and ``training.on_save_error`` is stop.
        """
        try:
            path = self.store.wait()
        except UserError as error:
            self._failed(error, self.saved_at)  # no later one has begun
            return
        if path is not None:
            logger.info("Saved checkpoint to %s", path)

    def _export(self, step: int, path: Path) -> bool:
        every = self.training.export_steps
        if self.export is None or not every or step % every:
            return True
        self.settle()  # an export stands beside a complete checkpoint
        if self.saved_at != step:
            return False
        try:
            self.export(path / "hf")
        except UserError as error:
            self._failed(error)
        return True

    def _failed(self, error: UserError, step: int | None = None) -> None:
        """A save of ``step``, or what belongs to one that stands, has failed."""
        if self.training.on_save_error == "stop":
            raise error
        if step is not None:
            self.lost.add(step)
            self.saved_at = -1
        logger.error("%s. Training goes on (training.on_save_error: continue)", str(error).rstrip("."))
