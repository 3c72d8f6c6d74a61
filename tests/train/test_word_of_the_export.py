"""What a finished run leaves as word of its export, and when a later start may believe it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from shardyard.checkpoint import CheckpointStore
from shardyard.checkpoint.exported import is_exported
from shardyard.train.exporting import Exporter


class _Exporter(Exporter):
    def into(self, folder: Path) -> None:
        save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")


def _save(out: Path, step: int, value: float) -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, value)
    CheckpointStore(out, save_total_limit=None).save(
        step, model=model, optimizer=None, run_state={"step": step}
    )


def _export(out: Path, step: int) -> None:
    config = SimpleNamespace(training=SimpleNamespace(output_dir=str(out)))
    _Exporter(config, None, None).finish(step, is_main=True)  # type: ignore[arg-type]


def test_an_export_counts_for_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    _save(tmp_path, 3, 1.0)
    _save(tmp_path, 6, 1.0)
    assert not is_exported(tmp_path, 6)
    _export(tmp_path, 6)
    assert is_exported(tmp_path, 6) and not is_exported(tmp_path, 3)


def test_a_step_that_was_saved_again_is_not_exported_yet(tmp_path: Path) -> None:
    # The run goes back to step 3, saves other weights as step 6, and is killed before its export.
    _save(tmp_path, 6, 1.0)
    _export(tmp_path, 6)
    _save(tmp_path, 6, 2.0)
    assert not is_exported(tmp_path, 6)
    _export(tmp_path, 6)
    assert is_exported(tmp_path, 6)


def test_an_export_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    _save(tmp_path, 6, 1.0)
    _export(tmp_path, 6)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_exported(tmp_path, 6)


def test_an_export_that_was_removed_does_not_count(tmp_path: Path) -> None:
    _save(tmp_path, 6, 1.0)
    _export(tmp_path, 6)
    (tmp_path / "model.safetensors").unlink()
    assert not is_exported(tmp_path, 6)


def test_without_checkpoints_nothing_is_left_of_it(tmp_path: Path) -> None:
    _export(tmp_path, 6)
    assert not is_exported(tmp_path, 6) and not (tmp_path / "checkpoints").exists()
