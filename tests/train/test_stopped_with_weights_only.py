"""A run that saves weights alone and is asked to stop saves all that it needs to go on."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.validation import RecordingStore, scripted_trainer

OPTIMIZER = object()


@dataclass
class _Store(RecordingStore):
    """Notes which saves had the optimizer."""

    whole: list[int] = field(default_factory=list)

    def save(self, step: int, *, optimizer: Any, **rest: Any) -> Path:
        if optimizer is OPTIMIZER:
            self.whole.append(step)
        return super().save(step, optimizer=optimizer, **rest)


class _SignalledStep:
    """Stands for a step; gets SIGTERM in number ``stop``."""

    def __init__(self, step: Any, stop: int) -> None:
        self._step, self._stop, self.notice = step, stop, lambda: 0

    def __call__(self, micro_batches: Any, *, step: int, lr: float) -> Any:
        if step == self._stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return replace(self._step(micro_batches, step=step, lr=lr), notice=self.notice())

    def compare_replicas(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("only_model", "stop", "saved", "whole"),
    [
        (True, 4, [3, 4], [4]),
        (True, 3, [3, 3], [3]),  # what was due holds weights alone
        (False, 3, [3], [3]),
        (True, 99, [3, 6, 8], []),
    ],
)
def test_the_save_of_a_stop_has_the_optimizer(
    tmp_path: Path, only_model: bool, stop: int, saved: list[int], whole: list[int]
) -> None:
    store = _Store(tmp_path / "checkpoints")
    trainer = scripted_trainer(tmp_path, None, store=store, save_steps=3, save_only_model=only_model)
    trainer.step, trainer.saver.optimizer = _SignalledStep(trainer.step, stop), OPTIMIZER
    trainer.train()
    assert (store.saved, store.whole) == (saved, whole)
