"""Which checkpoint a name means, what is said when it means none, and copies that look alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.checkpoint import CheckpointStore
from shardyard.checkpoint.loading import _compare
from shardyard.checkpoint.store import _by_sequence
from shardyard.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run", save_total_limit=None)
    for step in (3, 6):
        store.save(step, model=torch.nn.Linear(1, 1), optimizer=None, run_state={}, best=step == 3)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "fault", "meant"),
    [
        ((), "is not a complete checkpoint", "global_step_6"),
        (("checkpoints",), "is not a complete checkpoint", "global_step_6"),
        (("checkpoints", "latest"), "is no folder", "global_step_6"),
        (("checkpoints", "best"), "is no folder", "global_step_3"),
        (("checkpoints", "global_step_9"), "does not exist", None),
        (("checkpoints", "global_step_6", "run_state.json"), "is no folder", None),
    ],
)
def test_a_path_beside_the_mark_is_told_and_the_checkpoint_named(
    run: Path, words: tuple[str, ...], fault: str, meant: str | None
) -> None:
    with pytest.raises(UserError) as caught:
        CheckpointStore(run, save_total_limit=None).resolve(str(run.joinpath(*words)))
    hint = f"; did you mean {run / 'checkpoints' / meant}?" if meant else ""
    assert f"{run.joinpath(*words)} {fault}" in str(caught.value)
    assert str(caught.value).endswith(hint) and ("did you mean" in str(caught.value)) == bool(meant)


def test_of_copies_every_rank_takes_the_same(run: Path) -> None:
    # A copy has the step and the place among the saves of its original; a set has no order of its own.
    shutil.copytree(run / "checkpoints" / "global_step_6", run / "checkpoints" / "global_step_06")
    store = CheckpointStore(run, save_total_limit=None)
    copies = [one for one in store._numbered() if one[1] in ("global_step_6", "global_step_06")]
    orders = [sorted(seen, key=_by_sequence, reverse=True) for seen in (copies, copies[::-1])]
    assert len(copies) == 2 and orders[0] == orders[1]
    newest = store.latest()
    assert newest is not None and newest.name == orders[0][0][1]


def test_what_was_frozen_then_is_said_where_only_moments_differ() -> None:
    fact: Any = ((2, 2), torch.float32)
    weights = {"model.a": fact, "model.b": fact}
    moments = {"optimizer.a.exp_avg": fact, "optimizer.b.exp_avg": fact}
    fewer = {"optimizer.a.exp_avg": fact}
    with pytest.raises(
        UserError,
        match=r"1 missing \(such as optimizer.b.exp_avg\); training.optimizer and what model.freeze",
    ):
        _compare(weights | moments, weights | fewer)
    with pytest.raises(
        UserError,
        match=r"1 unknown to it \(such as optimizer.b.exp_avg\); training.optimizer and what model.freeze",
    ):
        _compare(weights | fewer, weights | moments)
    with pytest.raises(UserError) as caught:
        _compare(weights | moments, {"model.a": fact} | moments)
    assert "model.freeze" not in str(caught.value)
