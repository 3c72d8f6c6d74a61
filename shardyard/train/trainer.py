"""The run: batches in, updates out, records and checkpoints on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.checkpoint import CheckpointStore
from shardyard.config import TrainingConfig
from shardyard.data.sampler import ElasticSampler
from shardyard.data.types import StepBatch
from shardyard.device import ProcessGroup
from shardyard.monitor import Monitor, StepRecord
from shardyard.optim import Schedule
from shardyard.train.state import RunState
from shardyard.train.step import StepResult, TrainStep

Observer = Callable[[StepRecord | None], None]

logger = logging.getLogger("shardyard.train")


@dataclass
class Trainer:
    """Everything a run holds while it trains. ``train`` reads top to bottom."""

    step: TrainStep
    batches: Iterable[StepBatch]
    schedule: Schedule
    monitor: Monitor
    store: CheckpointStore
    group: ProcessGroup
    training: TrainingConfig
    sampler: ElasticSampler
    state: RunState
    settings: dict[str, Any]
    """What a resumed run compares its own settings with."""
    saved_at: int = 0
    """The step of the newest checkpoint of this run."""
    observe: Observer | None = None
    """Called with None before the first step and with the record of each step after it."""

    def train(self) -> RunState:
        """Run the updates that are left.

        Raises:
            NonFiniteError: a loss or gradient is NaN or Inf and ``training.on_nonfinite`` is stop.
        """
        self._tell(None)
        started = time.perf_counter()
        for batch in self.batches:
            number = self.state.step + 1
            lr = self.schedule.lr_at(number)
            result = self._run_step(batch, number, lr)
            if result.skipped:
                logger.warning("step %d skipped, weights unchanged: %s", number, result.skipped)
            samples = batch.end - batch.start
            self.state = self.state.after(cursor=batch.end, samples=samples, tokens=result.num_tokens)
            elapsed = time.perf_counter() - started
            record = self._record(batch, result, lr, elapsed)
            self.monitor.record(record)
            self._tell(record)
            if self._save_is_due(batch):
                self.save()
            # The next step's time includes the wait for its batch, but not this save.
            started = time.perf_counter()
        if self._saves_at_all and self.saved_at != self.state.step:
            self.save()
        return self.state

    def _tell(self, record: StepRecord | None) -> None:
        if self.observe is not None:
            self.observe(record)

    def _run_step(self, batch: StepBatch, number: int, lr: float) -> StepResult:
        try:
            return self.step(batch.micro_batches, step=number, lr=lr)
        except Exception as error:
            ids = [list(micro_batch.sample_ids) for micro_batch in batch.micro_batches]
            error.add_note(f"in step {number}, samples {ids} of this rank")
            raise

    def save(self) -> Path:
        """Write a checkpoint of this step; every rank calls it."""
        started = time.perf_counter()
        optimizer = None if self.training.save_only_model else self.step.optimizer
        path = self.store.save(
            self.state.step,
            model=self.step.model,
            optimizer=optimizer,
            run_state={**self.state.to_json(), "settings": self.settings},
        )
        self.saved_at = self.state.step
        logger.info("Saved checkpoint to %s (%.1f s)", path, time.perf_counter() - started)
        return path

    @property
    def _saves_at_all(self) -> bool:
        return self.training.save_steps > 0 or self.training.save_epochs > 0

    def _save_is_due(self, batch: StepBatch) -> bool:
        steps, epochs = self.training.save_steps, self.training.save_epochs
        if steps > 0 and self.state.step % steps == 0:
            return True
        return epochs > 0 and self.sampler.ends_epoch(batch.end) and (batch.epoch + 1) % epochs == 0

    def _record(self, batch: StepBatch, result: StepResult, lr: float, elapsed: float) -> StepRecord:
        return StepRecord(
            step=self.state.step,
            total_steps=self.schedule.total,
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self.state.consumed_tokens,
            step_ms=elapsed * 1000.0,
            lr=lr,
            global_batch_size=batch.end - batch.start,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=result.num_tokens,
            memory_allocated_bytes=result.memory_allocated,
            memory_reserved_bytes=result.memory_reserved,
            epoch=batch.epoch,
        )
