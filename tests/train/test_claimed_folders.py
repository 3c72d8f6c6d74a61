"""The folder of a run: what damage in it leads to, and what a run that cannot begin leaves there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardyard.checkpoint import CheckpointStore
from shardyard.errors import UserError
from shardyard.train import run_folder
from shardyard.train.run_folder import (
    claim_output_dir,
    give_back_output_dir,
    look_at_output_dir,
    nothing_left,
)


def config_of(out: Path, resume: str | None = "latest") -> Any:
    training = SimpleNamespace(
        output_dir=str(out), resume_from_checkpoint=resume, overwrite_output_dir=False, save_hf_weights=False
    )
    model = SimpleNamespace(model_name_or_path="none", config_name_or_path=None, tokenizer_name_or_path=None)
    return SimpleNamespace(training=training, model=model, data=SimpleNamespace(dataset_names=[]))


def save(out: Path, step: int) -> Path:
    state = {"step": step, "settings": {"ranks": 1, "schedule": {"total": step}}}
    store = CheckpointStore(out, save_total_limit=None)
    return store.save(step, model=torch.nn.Linear(2, 2), optimizer=None, run_state=state)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that ends with step 4, whose settings are those of its checkpoint."""
    monkeypatch.setattr(run_folder, "changes_the_outcome", lambda before, now: False)
    monkeypatch.setattr(run_folder, "RunFacts", _Facts)
    return save(tmp_path, 4)


class _Facts(SimpleNamespace):
    @classmethod
    def from_json(cls, values: dict[str, Any]) -> _Facts:
        return cls(**values)

    @classmethod
    def of(cls, config: Any) -> _Facts:
        return cls()


@pytest.mark.parametrize("offset", [0, -3, None])
def test_a_run_state_that_has_changed_tells_nothing_of_a_complete_run(
    tmp_path: Path, finished: Path, offset: int | None
) -> None:
    assert nothing_left(config_of(tmp_path), str(finished), 1) == "yes"
    state = finished / "run_state.json"
    content = bytearray(state.read_bytes())
    if offset is None:
        content = bytearray(content.replace(b"4", b"9"))  # still JSON: a step that never was
    else:
        content[offset] ^= 0x10
    state.write_bytes(content)
    assert nothing_left(config_of(tmp_path), str(finished), 1) == ""


def test_latest_does_not_start_anew_over_checkpoints_that_are_damaged(tmp_path: Path) -> None:
    first, second = save(tmp_path, 2), save(tmp_path, 4)
    os.truncate(second / "__0_0.distcp", 10)
    assert look_at_output_dir(config_of(tmp_path)) == str(first)
    (first / ".metadata").unlink()
    with pytest.raises(UserError) as caught:
        look_at_output_dir(config_of(tmp_path))
    assert f"{second} is not complete, and neither is another one" in str(caught.value)
    assert look_at_output_dir(config_of(tmp_path / "new")) == ""


def test_settings_that_a_full_disk_does_not_take_leave_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "dump_yaml", lambda config, origins: "second")
    (tmp_path / "resolved_config.yaml").write_text("first")
    loaded: Any = SimpleNamespace(config=config_of(tmp_path), origins={})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = "resolved_config.yaml cannot be written: No space left on device"
    with monkeypatch.context() as patched, pytest.raises(UserError, match=said):
        patched.setattr(os, "fsync", full)
        claim_output_dir(loaded)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("resolved_config.yaml", "first")
    ]
    claim_output_dir(loaded)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("resolved_config.yaml", "second")
    ]


def test_a_run_that_could_not_begin_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "resolved_config.yaml").write_text("x")
    give_back_output_dir(config_of(new))
    assert look_at_output_dir(config_of(new, resume=None)) == ""
    (new / "resolved_config.yaml").write_text("x")
    (new / "metrics.jsonl").write_text("")
    give_back_output_dir(config_of(new))
    assert (new / "resolved_config.yaml").exists()
