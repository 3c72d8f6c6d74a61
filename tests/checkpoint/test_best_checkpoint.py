"""The best checkpoint: what `best` names, what retention leaves, and its weights at a run's end."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import die_at_file_operation
from support.models import write_tiny_model
from support.ranks import RankFailure
from support.training import Recipe, make_rows, whole
from support.validation import ScriptedEvaluator, real_trainer

from shardyard.checkpoint import CheckpointStore, fault_of


def saved(out: Path, saves: str, limit: int | None) -> tuple[list[int], int | None]:
    """Save each step of ``saves`` ("1 2* 3": 2 as the best); the steps that are left, and the best one."""
    store, model = CheckpointStore(out, save_total_limit=limit), torch.nn.Linear(2, 2)
    for word in saves.split():
        store.save(int(word.strip("*")), model=model, optimizer=None, run_state={}, best="*" in word)
    return left_in(out), number(store.best())


def left_in(out: Path) -> list[int]:
    return sorted(number(path) for path in (out / "checkpoints").glob("global_step_*") if not fault_of(path))


def number(path: Path | None) -> Any:
    return None if path is None else int(path.name.removeprefix("global_step_"))


@pytest.mark.parametrize(
    ("saves", "limit", "left", "best"),
    [
        ("1 2 3 4", 2, [3, 4], None),
        ("1* 2 3 4", 2, [1, 3, 4], 1),  # the best one beside the two newest
        ("1 2* 3 4* 5 6", 2, [4, 5, 6], 4),  # a new best releases the old
        ("1 2 3*", 1, [2, 3], 3),  # the best is not counted, also when it is the newest
        ("1 2 3* 4", 1, [3, 4], 3),
        ("1* 2* 3* 4*", 1, [3, 4], 4),
        ("1* 2 3", None, [1, 2, 3], 1),
        ("2* 3 4 2", 1, [2, 4], 2),  # saved again, after a resume: the newest, and still the best
    ],
)
def test_retention_keeps_the_best_beside_the_newest(tmp_path, saves, limit, left, best):
    assert saved(tmp_path, saves, limit) == (left, best)
    newest = CheckpointStore(tmp_path, save_total_limit=limit).latest()
    assert number(newest) == int(saves.split()[-1].strip("*"))


def test_best_is_a_line_of_text_like_latest(tmp_path):
    saved(tmp_path, "1 2* 3", None)
    folder = tmp_path / "checkpoints"
    assert (folder / "best").read_text() == "global_step_2\n"
    assert (folder / "latest").read_text() == "global_step_3\n"
    assert sorted(p.name for p in folder.iterdir()) == [
        "best",
        *(f"global_step_{n}" for n in (1, 2, 3)),
        "latest",
    ]


def test_a_resumed_run_says_which_checkpoint_is_the_best(tmp_path):
    saved(tmp_path, "1* 2* 3", None)
    store = CheckpointStore(tmp_path, save_total_limit=None)
    assert store.point_best(1) and number(store.best()) == 1
    assert not store.point_best(7) and store.best() is None, "no such checkpoint: none is the best"
    assert store.point_best(3) and not store.point_best(None) and store.best() is None
    assert not CheckpointStore(tmp_path / "new", save_total_limit=None).point_best(None)


@pytest.mark.parametrize(
    "content", [b"", b"../x", b"global_step_9", b"/etc", b"\xff\xfe", b"global_step_1/.."]
)
def test_a_pointer_to_no_complete_checkpoint_names_none(tmp_path, content):
    saved(tmp_path, "1 2", 1)
    (tmp_path / "checkpoints" / "best").write_bytes(content)
    assert CheckpointStore(tmp_path, save_total_limit=None).best() is None
    assert saved(tmp_path, "3 4", 1) == ([4], None)


def test_a_damaged_checkpoint_is_not_the_best(tmp_path):
    saved(tmp_path, "1* 2", None)
    next((tmp_path / "checkpoints" / "global_step_1").glob("*.distcp")).write_bytes(b"")
    assert CheckpointStore(tmp_path, save_total_limit=None).best() is None


def die_while_saving(out: Path, place: int) -> bool:
    """Save a new best one and be killed at the ``place``-th file operation; True when there are fewer."""
    saved(out, "1* 2", 1)
    die_at_file_operation(place)
    saved(out, "3*", 1)
    return True


@pytest.mark.soak
def test_there_is_a_complete_best_checkpoint_wherever_a_save_dies(ranks, tmp_path):
    """It is the old one until the new one is complete, and retention removes neither."""
    named = []
    for place in range(500):
        out = tmp_path / str(place)
        try:
            survived = ranks.run(1, die_while_saving, out, place, init_process_group=False)[0]
        except RankFailure as failure:
            assert f"exit code {-signal.SIGKILL}" in str(failure)
            survived = False
        named.append(number(CheckpointStore(out, save_total_limit=None).best()))
        assert named[-1] in left_in(out) and {2, 3} & set(left_in(out))
        if survived:
            break
    assert survived and len(named) > 20
    assert named[0] == 1 and named[-1] == 3 and named == sorted(named)


TRAINING = {
    "lr": 1e-2, "max_steps": 6, "eval_steps": 1, "save_steps": 2, "save_epochs": 0, "save_total_limit": 1,
    "per_device_train_batch_size": 4, "keep_best_checkpoint": True, "load_best_model_at_end": True,
}  # fmt: skip
LOSSES = [5.0, 4.0, 3.0, 3.5, 3.2, 3.1]


def train_to_the_end(folder: Path, out: Path, losses: list[float], **training: Any) -> dict[str, Any]:
    """What a run leaves in memory and in its folder, and the weights after each of its steps."""
    evaluator = ScriptedEvaluator(losses)
    recipe = Recipe(training=TRAINING | training)
    trainer = real_trainer(folder, out, recipe, make_rows(16), sets=None, evaluator=evaluator)
    after: dict[int, dict[str, np.ndarray]] = {}

    def observe(record: Any) -> None:
        if record is not None:
            after[record.step] = weights_of(trainer)

    trainer.observe = observe
    state = trainer.train()
    trainer.monitor.close()
    return {"end": weights_of(trainer), "after": after, "state": state, "given": evaluator.given}


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in whole(dict(trainer.step.model.named_parameters())).items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def test_the_best_weights_are_in_the_model_at_the_end_and_the_last_ones_in_latest(ranks, folder, tmp_path):
    for found in ranks.run(2, train_to_the_end, folder, tmp_path, LOSSES):
        assert (found["state"].best_step, found["state"].step) == (3, 6)
        assert equal(found["end"], found["after"][3]) and not equal(found["end"], found["after"][6])
    assert left_in(tmp_path) == [3, 6]
    folder_of = tmp_path / "checkpoints"
    assert (folder_of / "best").read_text() == "global_step_3\n"
    assert (folder_of / "latest").read_text() == "global_step_6\n"


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 3])
def test_stopping_early_with_the_best_kept_survives_a_resume(ranks, folder, tmp_path, world):
    """Best at step 3, stopped at 5, resumed at 4: the end is that of the unbroken run."""
    options = {"early_stopping_patience": 2, "save_total_limit": None}
    wanted = ranks.run(world, train_to_the_end, folder, tmp_path / "unbroken", LOSSES, **options)[0]
    assert wanted["state"].step == 5 and wanted["given"] == 5
    ranks.run(world, train_to_the_end, folder, tmp_path / "broken", LOSSES, **options)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "global_step_5")
    path = str(tmp_path / "broken" / "checkpoints" / "global_step_4")
    options["resume_from_checkpoint"] = path
    found = ranks.run(world, train_to_the_end, folder, tmp_path / "broken", LOSSES[4:], **options)[0]
    assert found["state"] == wanted["state"] and found["given"] == 1
    assert equal(found["end"], wanted["end"]) and equal(found["end"], wanted["after"][3])
    again = options | {"resume_from_checkpoint": path.replace("_4", "_5")}
    stopped = ranks.run(world, train_to_the_end, folder, tmp_path / "broken", [], **again)[0]
    assert stopped["state"] == wanted["state"] and stopped["after"] == {}, "it has stopped, and stays stopped"
    assert equal(stopped["end"], wanted["end"])
