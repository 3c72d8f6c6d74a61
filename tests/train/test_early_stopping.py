"""When a run validates, when it stops early, what is saved as the best: with losses that a script gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.validation import RecordingStore, scripted_trainer

from shardyard.monitor import read_metrics, read_validations
from shardyard.train.state import RunState

FALLING = [1.0 / n for n in range(1, 30)]


def validated_steps(out: Path) -> list[int]:
    return [values["step"] for values in read_validations(out / "metrics.jsonl")]


# 8 rows in batches of 2: epochs of 4 updates, 8 updates in all.
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eval_steps": 3}, [3, 6, 8]),
        ({"eval_steps": 4}, [4, 8]),
        ({"eval_steps": 100}, [8]),
        ({}, [4, 8]),
        ({"num_train_epochs": 1.5}, [4, 6]),
        ({"eval_steps": 3, "eval_on_start": True}, [0, 3, 6, 8]),
        ({"max_steps": 5, "eval_on_start": True}, [0, 4, 5]),
    ],
)
def test_validations_come_when_the_settings_say_and_once_at_the_end(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    scripted_trainer(tmp_path, FALLING, **options).train()
    assert validated_steps(tmp_path) == steps
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == steps[-1]


def test_without_an_evaluation_set_nothing_is_validated(tmp_path: Path) -> None:
    state = scripted_trainer(tmp_path, None, eval_steps=1, eval_on_start=True).train()
    assert validated_steps(tmp_path) == [] and state.evaluated_step == -1


# Losses of the validations after steps 1, 2, 3, ...; the step at which the run ends.
@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "ends"),
    [
        ([5, 4, 4, 3, 3, 3, 2, 2], 2, 0.0, 6),
        ([5, 4, 4, 3, 3, 3, 2, 2], 1, 0.0, 3),
        ([5, 4, 4, 3, 3, 3, 2, 2], 3, 0.0, 8),
        ([5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3], 2, 0.15, 8),  # improves on the best at every other one
        ([5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3], 2, 0.35, 3),
        ([math.nan] * 8, 2, 0.0, 2),
        ([math.inf, math.inf, 5, 4, 3, 2, 1, 0], 3, 0.0, 8),
        ([5, math.nan, 4, math.nan, math.nan, 1, 1, 1], 2, 0.0, 5),
        ([8, 7, 6, 5, 4, 3, 2, 2], 1, 0.0, 8),  # what would stop it is the run's end
    ],
)
def test_a_run_stops_after_that_many_validations_without_improvement(
    tmp_path: Path, losses: list[float], patience: int, min_delta: float, ends: int, caplog: Any
) -> None:
    options = {"early_stopping_patience": patience, "early_stopping_min_delta": min_delta}
    trainer = scripted_trainer(tmp_path, losses, eval_steps=1, save_steps=100, logging_steps=100, **options)
    with caplog.at_level("INFO", "shardyard"):
        state = trainer.train()
    assert state.step == ends and validated_steps(tmp_path) == list(range(1, ends + 1))
    assert trainer.store.saved == [ends], "the final checkpoint is written as at any end"
    assert (f"Stopping early at step {ends} of 8" in caplog.text) == (ends < 8)
    assert f"iteration {ends:8d}/" in caplog.text, "the unfinished interval's line is printed"


def test_a_loss_at_the_start_is_what_later_ones_have_to_fall_below(tmp_path: Path) -> None:
    options = {"eval_steps": 2, "eval_on_start": True, "early_stopping_patience": 2}
    state = scripted_trainer(tmp_path, [1.0, 1.1, 1.0], keep_best_checkpoint=True, **options).train()
    assert (state.step, state.best_step, state.best_loss, state.bad_evaluations) == (4, 0, 1.0, 2)


def resumed_from(trainer: Any, step: int) -> RunState:
    """The state as a checkpoint's JSON gives it back."""
    return RunState.from_json(json.loads(json.dumps(trainer.store.states[step])))


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_stopping_early_survives_a_resume_at_any_step(tmp_path: Path, at: int) -> None:
    losses = [5.0, 3.0, 4.0, 2.0, 2.5, 2.5, 1.0, 1.0]
    options: dict[str, Any] = {
        "eval_steps": 1, "eval_on_start": False, "early_stopping_patience": 2, "save_steps": 1,
        "keep_best_checkpoint": True,
    }  # fmt: skip
    unbroken = scripted_trainer(tmp_path / "unbroken", losses, **options)
    wanted = unbroken.train()
    assert (wanted.step, wanted.best_step, wanted.best_loss) == (6, 4, 2.0)
    assert unbroken.store.saved == [1, 2, 3, 4, 5, 6], "a step whose save is due anyway is saved once"
    assert unbroken.store.best == [1, 2, 4]

    broken = scripted_trainer(tmp_path / "broken", losses, **options)
    broken.train()
    state = resumed_from(broken, at)
    resumed = scripted_trainer(tmp_path / "broken", losses[at:], state=state, **options)
    assert resumed.train() == wanted
    assert validated_steps(tmp_path / "broken") == [1, 2, 3, 4, 5, 6]


def test_a_resume_at_the_run_s_end_validates_once_in_all(tmp_path: Path) -> None:
    """Also when the checkpoint of the last step was written by a run that had no validation there."""
    first = scripted_trainer(tmp_path, FALLING, eval_steps=5, save_steps=2, max_steps=8)
    first.train()
    assert validated_steps(tmp_path) == [5, 8]
    state = resumed_from(first, 6)
    shorter = {"eval_steps": 5, "save_steps": 2, "max_steps": 6}
    ended = scripted_trainer(tmp_path, [0.25], state=state, **shorter)
    ended.train()
    assert validated_steps(tmp_path) == [5, 6] and ended.store.saved == []
    scripted_trainer(tmp_path, [0.25], state=state, **shorter).train()
    assert validated_steps(tmp_path) == [5, 6]
    scripted_trainer(tmp_path, [], state=ended.state, **shorter).train()
    assert validated_steps(tmp_path) == [5, 6]


def test_a_new_run_in_the_folder_keeps_no_validation_of_the_old(tmp_path: Path) -> None:
    for _ in range(2):
        scripted_trainer(tmp_path, FALLING, eval_steps=4, eval_on_start=True).train()
        assert validated_steps(tmp_path) == [0, 4, 8]


def test_the_best_is_saved_though_no_other_checkpoint_is_asked_for(tmp_path: Path) -> None:
    trainer = scripted_trainer(tmp_path, [3.0, 2.0, 2.5, 1.0], eval_steps=2, keep_best_checkpoint=True)
    trainer.train()
    assert trainer.store.saved == trainer.store.best == [2, 4, 8]


def test_a_best_checkpoint_that_is_gone_is_said_and_a_new_one_made(tmp_path: Path, caplog: Any) -> None:
    state = RunState("rows", step=4, cursor=8, evaluated_step=4, best_loss=0.5, best_step=2)
    store = RecordingStore(tmp_path, lost=True)
    options = {"eval_steps": 2, "keep_best_checkpoint": True}
    with caplog.at_level("WARNING", "shardyard"):
        end = scripted_trainer(tmp_path, [2.0, 1.0], state=state, store=store, **options).train()
    assert "of step 2, is not in" in caplog.text
    assert store.best == [6, 8] and (end.best_step, end.best_loss) == (8, 1.0)


def test_a_checkpoint_without_validation_fields_can_be_resumed(tmp_path: Path) -> None:
    old = {"data_order": "rows", "step": 3, "cursor": 6, "consumed_samples": 6, "consumed_tokens": 18}
    state = RunState.from_json(old | {"settings": {}})
    assert (state.evaluated_step, state.best_loss, state.bad_evaluations) == (-1, None, 0)
    with pytest.raises(TypeError, match="data_order"):
        RunState.from_json({"step": 3})


def test_lines_and_objects_of_a_validation(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("INFO", "shardyard.monitor"):
        scripted_trainer(tmp_path, [2.0, math.nan], max_steps=2, eval_steps=1).train()
    lines = [r.getMessage() for r in caplog.records if "validation at" in r.getMessage()]
    assert lines == [
        " validation at step 1 | set held out | lm loss: 2.000000E+00 | ppl: 7.39 | tokens: 12 | 0.5 s |",
        " validation at step 2 | set held out | lm loss: nan | ppl: nan | tokens: 12 | 0.5 s |",
    ]
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    score = {"loss": 2.0, "ppl": math.exp(2.0), "tokens": 12, "labelled": 10, "seconds": 0.5}
    assert json.loads(text[1]) == {"step": 1, "eval": {"held out": score, "all": score}}
    assert json.loads(text[3])["eval"]["all"]["loss"] == "nan"
    assert math.isnan(read_validations(tmp_path / "metrics.jsonl")[1]["eval"]["held out"]["ppl"])
    assert [values["step"] for values in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
