"""The run: batches in, updates out; records, validations and checkpoints on the way."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardyard.checkpoint import CheckpointStore
from shardyard.config import TrainingConfig
from shardyard.data.sampler import Sampler
from shardyard.data.types import StepBatch
from shardyard.device import StopSignal, note_saved
from shardyard.errors import UserError
from shardyard.evaluate.evaluator import Evaluator
from shardyard.monitor import Monitor, StepRecord
from shardyard.optim import Schedule
from shardyard.train.saving import Saver
from shardyard.train.state import RunState
from shardyard.train.step import StepResult, TrainStep

if TYPE_CHECKING:
    from shardyard.evaluate.in_training import BenchmarksInTraining

Observer = Callable[[StepRecord | None], None]

logger = logging.getLogger("shardyard.train")
_SAVE_OVER, _STOP = 1, 2
"""Bits of a rank's notice at the end of a step."""


@dataclass
class Trainer:
    """Everything a run holds while it trains. ``train`` reads top to bottom."""

    step: TrainStep
    batches: Iterable[StepBatch]
    schedule: Schedule
    monitor: Monitor
    saver: Saver
    training: TrainingConfig
    sampler: Sampler
    state: RunState
    observe: Observer | None = None
    """Called with None before the first step and with the record of each step after it."""
    evaluator: Evaluator | None = None
    """None: the run has nothing to validate on."""
    benchmarks: BenchmarksInTraining | None = None
    """None: no tasks are asked."""

    def __post_init__(self) -> None:
        self.interrupted: signal.Signals | None = None
        """The signal that stopped the run before its end; it has been saved then."""
        self._best_before: tuple[float | None, int | None] = (None, None)
        """Loss and step of what `best` points to until the save of a new best one has succeeded."""
        self._judged_best: int | None = None
        """The step that a validation of this process found best last, whatever became of its save."""

    @property
    def store(self) -> CheckpointStore:
        return self.saver.store

    def train(self) -> RunState:
        """Run the updates that are left.

        Raises:
            NonFiniteError: a loss or gradient is NaN or Inf and ``training.on_nonfinite`` is stop.
            UserError: a checkpoint cannot be written and ``training.on_save_error`` is stop.
        """
        self._tell(None)
        with (
            StopSignal(enabled=self.training.save_on_signal) as self.stop_signal,
            closing(self.store),
        ):
            self._begin_validation()
            if self.benchmarks is not None and self.benchmarks.settings.at_start and self.state.step == 0:
                self._ask_benchmarks()
            try:
                if not self._stops_early():
                    self._run_updates()
            except KeyboardInterrupt:
                self._tell_what_is_saved()
                raise
            if self.interrupted is None:
                self._conclude()
            self._settle()
        return self.state

    def _conclude(self) -> None:
        """What stands at the end of a complete run."""
        if self.state.evaluated_step != self.state.step:
            self._validate()
        if self.saver.saves_at_all and self.saver.saved_at != self.state.step:
            self._save()
        if self.training.load_best_model_at_end:
            self._settle()
            self._load_best()

    def _run_updates(self) -> None:
        started, first = time.perf_counter(), self.state.step + 1
        self.step.notice = self._notice
        for batch in self.batches:
            number = self.state.step + 1
            lr = self.schedule.lr_at(number)
            result = self._run_step(batch, number, lr)
            if result.skipped:
                logger.warning("step %d skipped, weights unchanged: %s", number, result.skipped)
            self.state = self.state.after(cursor=batch.end, samples=batch.size, tokens=result.num_tokens)
            if result.scale is not None:
                self.state = self.state.scaled(result.scale)
            elapsed = time.perf_counter() - started
            if number == first:
                self._check_replicas()
            record = self._record(batch, result, lr, elapsed)
            self.monitor.record(record)
            self._tell(record)
            if asked := self._benchmarks_are_due():
                self._ask_benchmarks()
            if self._validation_is_due(batch):
                self._validate()
            if self.saver.is_due(self.state.step, batch):
                self._save()
            if result.notice & _SAVE_OVER:
                self._settle()
            if result.notice & _STOP:
                self._stop_on_signal()
                return
            if self._stops_early():
                self.monitor.end_early()
                if self.benchmarks is not None and self.benchmarks.settings.at_end and not asked:
                    self._ask_benchmarks()
                return
            # The next step's time includes the wait for its batch, but not this save or validation.
            started = time.perf_counter()

    def _notice(self) -> int:
        return _SAVE_OVER * self.saver.is_over | _STOP * (self.stop_signal.asked is not None)

    def _stop_on_signal(self) -> None:
        """Save what there is: the run is to be gone before whoever sent the signal kills it."""
        self.interrupted = self.stop_signal.asked or signal.SIGTERM  # this rank's, or another's
        # With save_only_model what is there holds weights alone, and no run could go on from it.
        if self.saver.saved_at != self.state.step or self.training.save_only_model:
            self._save(whole=True)
        self._settle()
        if self.saver.saved_at != self.state.step:
            raise UserError(
                f"stopped by {self.interrupted.name} in step {self.state.step}, which is not saved"
            )
        note_saved(self.state.step)
        self.monitor.end_early()
        logger.info(
            "stopped by %s after step %d of %d, which is saved; go on with "
            "training.resume_from_checkpoint: latest",
            self.interrupted.name, self.state.step, self.schedule.total,
        )  # fmt: skip

    def _tell_what_is_saved(self) -> None:
        """After Ctrl-C, which waits for nothing."""
        saved = 0 if self.training.save_only_model else self.saver.saved_at
        go_on = f"step {saved} is saved; go on with training.resume_from_checkpoint: latest"
        logger.warning(
            "interrupted after step %d; %s", self.state.step, go_on if saved > 0 else "no step is saved"
        )

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

    def _begin_validation(self) -> None:
        """What a resumed run takes over, or the validation before the first update."""
        if self.evaluator is None:
            return
        best = self.state.best_step
        if self.training.keep_best_checkpoint and not self.store.point_best(best) and best is not None:
            logger.warning(
                "the best checkpoint so far, of step %d, is not in %s: the next validation starts anew",
                best, self.store.folder,
            )  # fmt: skip
            self.state = replace(self.state, best_loss=None, best_step=None)
        if self.training.eval_on_start and self.state.step == 0 and self.state.evaluated_step < 0:
            self._validate()

    def _validation_is_due(self, batch: StepBatch) -> bool:
        every = self.training.eval_steps
        if self.state.step == self.schedule.total:
            return True
        return self.state.step % every == 0 if every else self.sampler.ends_epoch(batch.end)

    def _benchmarks_are_due(self) -> bool:
        if self.benchmarks is None:
            return False
        is_last = self.state.step == self.schedule.total
        return self.benchmarks.is_due(self.state.step) or (is_last and self.benchmarks.settings.at_end)

    def _ask_benchmarks(self) -> None:
        """Before the save of the same step, so that a run that goes on from there has asked them."""
        assert self.benchmarks is not None
        results = self.benchmarks.ask()
        if results is not None:
            step = self.state.step
            self.monitor.record_benchmarks(step, *self.benchmarks.told(step, results))

    def _validate(self) -> None:
        """Score the sets; a new best is saved at once when the best checkpoint is kept."""
        if self.evaluator is None:
            return
        result = self.evaluator.evaluate()
        keeps_best = self.training.keep_best_checkpoint
        if keeps_best:
            self._settle()  # is the best one so far there?
        before, min_delta = self.state, self.training.early_stopping_min_delta
        self.state = self.state.judged(result.total.loss, min_delta=min_delta)
        self.monitor.record_validation(self.state.step, result)
        if keeps_best and self.state.best_step == self.state.step:
            self._best_before, self._judged_best = (before.best_loss, before.best_step), self.state.step
            self._save(best=True)

    def _save(self, *, best: bool = False, whole: bool = False) -> None:
        self._settle()  # what is saved tells of checkpoints that are there
        self.saver.save(self.state, best=best, whole=whole)
        self._forget_lost_best()

    def _settle(self) -> None:
        self.saver.settle()
        self._forget_lost_best()

    def _forget_lost_best(self) -> None:
        """A best checkpoint that could not be written leaves its place to the one before, which stands."""
        if self.training.keep_best_checkpoint and self.state.best_step in self.saver.lost:
            loss, step = self._best_before
            self.state = replace(self.state, best_loss=loss, best_step=step)
        self.saver.lost.clear()

    def _stops_early(self) -> bool:
        """Whether validations have gone without improvement for too long, which is then said."""
        state, patience = self.state, self.training.early_stopping_patience
        if self.evaluator is None or patience is None or state.bad_evaluations < patience:
            return False
        if state.step >= self.schedule.total:
            return False
        best = "no validation had a finite loss"
        if state.best_loss is not None:
            best = f"the best loss is {state.best_loss:.6f}, of step {state.best_step}"
        logger.info(
            "Stopping early at step %d of %d: %d validation(s) in a row without improvement; %s",
            state.step, self.schedule.total, state.bad_evaluations, best,
        )  # fmt: skip
        return True

    def _load_best(self) -> None:
        """Put the best weights into the model, for the export; the last checkpoint stays that of the end."""
        step = self.state.best_step
        if self.state.step in (step, self._judged_best):
            logger.info("the best weights are the last ones, of step %d", self.state.step)
        elif step is None:
            logger.warning("no validation had a finite loss: the last weights stand for the best ones")
        elif not self.store.point_best(step):
            logger.error("the best checkpoint, of step %d, is not there: the last weights stand for it", step)
        else:
            path = self.store.folder / f"global_step_{step}"
            self.store.load(path, model=self.step.model, optimizer=None)
            logger.info("Loaded the best weights, of step %d (loss %.6f)", step, self.state.best_loss)

    def _check_replicas(self) -> None:
        """Ranks that hold the same parameters would differ after the first update, if ever they do."""
        compared = self.step.compare_replicas()
        if compared:
            logger.info("after the first update %d tensors are equal on the ranks that share them", compared)

    def _record(self, batch: StepBatch, result: StepResult, lr: float, elapsed: float) -> StepRecord:
        routing = result.routing
        return StepRecord(
            step=self.state.step,
            total_steps=self.schedule.total,
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self.state.consumed_tokens,
            step_ms=elapsed * 1000.0,
            lr=lr,
            global_batch_size=batch.size,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=result.num_tokens,
            memory_allocated_bytes=result.memory_allocated,
            memory_reserved_bytes=result.memory_reserved,
            epoch=batch.epoch,
            loss_scale=self.state.loss_scale,
            aux_loss=routing and routing.aux_loss,
            max_expert_load=routing and routing.max_load,
            unused_experts=routing and routing.unused_experts,
        )
