"""Evaluators and trainers put together by hand: scripted ones without a model, and real ones on ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.training import VOCAB_SIZE, Recipe, build_step, samples_of


def eval_rows(count: int, seed: int = 7) -> list[tuple[list[int], list[int]]]:
    """Rows as `make_rows` makes them, of very unequal length; row 1 has no label where there are several."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(4, 60))
        ids = rng.integers(3, VOCAB_SIZE, length)
        labels = np.append(ids[1:], -100)
        labels[: length if index == 1 else int(rng.integers(0, length - 1))] = -100
        rows.append((ids.tolist(), labels.tolist()))
    return rows


def evaluator_of(
    built: Any, step: Any, meshes: Any, sets: dict[str, Any], per_device: int, packed: bool | None = None
) -> Any:
    """An `Evaluator` over ``sets`` (name -> samples) for what `build_step` gave."""
    from shardyard.data.eval_sets import EvalSet
    from shardyard.evaluate.evaluator import Evaluator

    return Evaluator(
        built.model, step.group, step.device, [EvalSet(name, samples) for name, samples in sets.items()],
        meshes=meshes, per_device=per_device,
        packed=built.unpacked is None if packed is None else packed,
    )  # fmt: skip


def real_trainer(
    folder: Path, out: Path, recipe: Recipe, rows: Any, *, sets: dict[str, Any] | None, evaluator: Any = None
) -> Any:
    """A `Trainer` on the ranks of the running group, wired as train/run.py does, from ``rows``."""
    import torch.distributed as dist

    from shardyard.checkpoint import CheckpointStore
    from shardyard.config import TrainingConfig
    from shardyard.data.batches import BatchLoader
    from shardyard.data.order import EpochOrder
    from shardyard.data.sampler import ElasticSampler
    from shardyard.monitor import Monitor
    from shardyard.optim import Schedule
    from shardyard.train.differences import RunFacts
    from shardyard.train.resume import restore
    from shardyard.train.saving import Saver
    from shardyard.train.trainer import Trainer

    built, step, meshes = build_step(folder, recipe)
    training = TrainingConfig(output_dir=str(out), **recipe.training)
    order = EpochOrder(len(rows), seed=training.seed, shuffle=True)
    sampler = ElasticSampler.of(training, order, dp_size=meshes.dp_size)
    store = CheckpointStore(out, save_total_limit=training.save_total_limit)
    facts = RunFacts(config={}, global_batch=sampler.global_batch)
    state, _ = restore(store, training.resume_from_checkpoint or "", built, step.optimizer, "rows", facts)
    batches = BatchLoader(
        samples_of(rows), sampler, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size,
        per_device=training.per_device_train_batch_size, start_cursor=state.cursor, start_step=state.step,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    monitor = Monitor(
        out, logging_steps=training.logging_steps, is_main=dist.get_rank() == 0, resume_step=state.step,
        evaluated_step=state.evaluated_step,
    )  # fmt: skip
    if sets is not None:
        per_device = training.per_device_eval_batch_size or training.per_device_train_batch_size
        evaluator = evaluator_of(built, step, meshes, sets, per_device)
    schedule = Schedule.of(training, sampler.last_step(cursor=state.cursor, step=state.step))
    saver = Saver(store, training, sampler, built.model, step.optimizer, asdict(facts), state.step)
    return Trainer(step, batches, schedule, monitor, saver, training, sampler, state, evaluator=evaluator)


@dataclass
class ScriptedEvaluator:
    """Gives the losses of a list, one a validation, over 10 labelled tokens."""

    losses: list[float]
    given: int = 0

    def evaluate(self) -> Any:
        from shardyard.monitor import EvalResult, EvalScore

        self.given += 1
        return EvalResult({"held out": EvalScore(self.losses[self.given - 1] * 10, 10, 12, 0.5)})


@dataclass
class RecordingStore:
    """A store that only notes which steps were saved, and which of them as the best."""

    folder: Path
    saved: list[int] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: bool = False
    """As if the best checkpoint were not there."""

    def save(
        self,
        step: int,
        *,
        model: Any,
        optimizer: Any,
        run_state: dict[str, Any],
        best: bool = False,
        assets: Any = None,
        wait: bool = True,
    ) -> Path:
        self.saved.append(step)
        self.states[step] = run_state
        if best:
            self.best.append(step)
        return self.folder / f"global_step_{step}"

    def poll(self) -> str:
        return "idle"

    def wait(self) -> None:
        return None

    def close(self) -> None:
        return None

    def point_best(self, step: int | None) -> bool:
        return step is not None and not self.lost


class _NoStep:
    """Stands for a model and its step: every update has loss 1."""

    model = optimizer = None

    def __call__(self, micro_batches: Any, *, step: int, lr: float) -> Any:
        from shardyard.train.step import StepResult

        return StepResult(1.0, 1.0, 5, 6, 0, 0)

    def compare_replicas(self) -> int:
        return 0


def scripted_trainer(
    out: Path,
    losses: list[float] | None,
    *,
    rows: int = 8,
    state: Any = None,
    store: Any = None,
    **training: Any,
) -> Any:
    """A `Trainer` without a model: ``rows`` samples, global batches of 2, validations as scripted."""
    from shardyard.config import TrainingConfig
    from shardyard.data.batches import BatchLoader
    from shardyard.data.order import EpochOrder
    from shardyard.data.sampler import ElasticSampler
    from shardyard.monitor import Monitor
    from shardyard.optim import Schedule
    from shardyard.train.saving import Saver
    from shardyard.train.state import RunState
    from shardyard.train.trainer import Trainer

    options: dict[str, Any] = {"save_steps": 0, "save_epochs": 0, "num_train_epochs": 2} | training
    config = TrainingConfig(output_dir=str(out), per_device_train_batch_size=2, **options)
    sampler = ElasticSampler.of(config, EpochOrder(rows, seed=0, shuffle=True), dp_size=1)
    state = state or RunState("rows")
    samples = samples_of([([3, 4], [4, -100])] * rows)
    batches = BatchLoader(
        samples, sampler, dp_rank=0, dp_size=1, per_device=2, start_cursor=state.cursor, start_step=state.step
    )
    out.mkdir(parents=True, exist_ok=True)
    monitor = Monitor(
        out, logging_steps=config.logging_steps, resume_step=state.step, evaluated_step=state.evaluated_step
    )
    evaluator: Any = None if losses is None else ScriptedEvaluator(losses)
    step: Any = _NoStep()
    store = store or RecordingStore(out / "checkpoints")
    schedule = Schedule.of(config, sampler.last_step(cursor=state.cursor, step=state.step))
    saver = Saver(store, config, sampler, step.model, step.optimizer, {}, state.step)
    return Trainer(step, batches, schedule, monitor, saver, config, sampler, state, evaluator=evaluator)
