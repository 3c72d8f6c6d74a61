"""A best checkpoint that cannot be written: the one before stays the best, to which later ones compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.validation import RecordingStore, scripted_trainer

from shardyard.errors import UserError


@dataclass
class _FailingStore(RecordingStore):
    """Cannot write the steps ``fails``, each once; tells at once, or to who waits."""

    fails: set[int] = field(default_factory=set)
    pending: int | None = None

    def save(self, step: int, *, wait: bool = True, **rest: Any) -> Path:
        if step not in self.fails:
            return super().save(step, wait=wait, **rest)
        self.fails.discard(step)
        if wait:
            raise UserError(f"saving step {step}: no space is left")
        self.pending = step
        return self.folder / f"global_step_{step}"

    def poll(self) -> str:
        return "idle" if self.pending is None else "failed"

    def wait(self) -> None:
        step, self.pending = self.pending, None
        if step is not None:
            raise UserError(f"saving step {step}: no space is left")


def run(out: Path, losses: list[float], fails: set[int], **options: Any) -> tuple[Any, _FailingStore]:
    store = _FailingStore(out / "checkpoints", fails=fails)
    options = {"eval_steps": 1, "keep_best_checkpoint": True, "on_save_error": "continue"} | options
    return scripted_trainer(out, losses, store=store, **options).train(), store


@pytest.mark.parametrize("save_async", [False, True])
def test_the_best_one_before_stays_until_a_better_one_is_written(tmp_path: Path, save_async: bool) -> None:
    losses = [5.0, 4.0, 3.0, 3.5, 3.6, 9.0, 9.0, 9.0]
    state, store = run(tmp_path, losses, {3}, save_async=save_async)
    # Step 3 (3.0) is lost; step 4 (3.5) is better than step 2 (4.0), which is there, and 5 (3.6) is not.
    assert store.best == [1, 2, 4]
    assert (state.best_step, state.best_loss) == (4, 3.5)


@pytest.mark.parametrize("save_async", [False, True])
def test_what_is_saved_later_does_not_tell_of_a_checkpoint_that_is_not_there(
    tmp_path: Path, save_async: bool
) -> None:
    losses = [5.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    state, store = run(tmp_path, losses, {2}, save_async=save_async, save_steps=5)
    assert store.saved == [1, 5, 8]
    assert [store.states[step]["best_step"] for step in (1, 5, 8)] == [1, 1, 1]
    assert (state.best_step, state.best_loss) == (1, 5.0)


def test_the_first_best_one_that_is_lost_leaves_none(tmp_path: Path) -> None:
    state, store = run(tmp_path, [5.0] + [9.0] * 7, {1}, save_steps=2)
    assert store.best == [2]  # 9.0 is the best that there is
    assert state.best_step == 2


@pytest.mark.parametrize("save_async", [False, True])
def test_the_best_weights_of_all_are_those_in_memory_though_they_could_not_be_saved(
    tmp_path: Path, save_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    with caplog.at_level("INFO", logger="shardyard.train"):
        state, _ = run(tmp_path, losses, {8}, save_async=save_async, load_best_model_at_end=True)
    assert "the best weights are the last ones, of step 8" in caplog.text
    assert state.best_step == 7  # of the checkpoints


def test_an_export_that_fails_does_not_make_its_checkpoint_be_saved_again(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path / "checkpoints")
    trainer = scripted_trainer(
        tmp_path, None, store=store, save_steps=4, export_steps=4, on_save_error="continue"
    )

    def export(folder: Path) -> None:
        raise UserError(f"exporting to {folder}: no space is left")

    trainer.saver.export = export
    trainer.train()
    assert store.saved == [4, 8]
