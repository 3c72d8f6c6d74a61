"""``shardyard train FILE --smoke``: a verdict on saving, resuming and exporting, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import ROOT, make_assets

from shardyard.cli.launch import Launch
from shardyard.cli.smoke import _judge, _overrides, smoke
from shardyard.config import load_config
from shardyard.errors import UserError


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets") / "assets")


def words(assets: Path, out: Path) -> list[str]:
    return [
        str(ROOT / "examples" / "quickstart" / "tune_tiny_qwen3.yaml"),
        f"model.model_name_or_path={assets}/model", f"model.cache_dir={assets.parent}/cache",
        f"data.dataset={assets}/alpaca.parquet", f"training.output_dir={out}",
    ]  # fmt: skip


def run(more: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardyard", "train", *more, "--smoke", "--nproc-per-node=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.soak
def test_a_run_that_works_passes_and_leaves_nothing(tmp_path: Path, assets: Path) -> None:
    done = run(words(assets, tmp_path / "runs" / "out"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("smoke test passed: step 2 after a resume is bit for bit the same (loss ")
    assert last.endswith("the export is verified")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.soak
def test_a_run_that_does_not_says_where_it_stopped(tmp_path: Path, assets: Path) -> None:
    wild = ["training.lr=1e30", "training.lr_scheduler_type=constant", "training.warmup_ratio=0"]
    done = run([*words(assets, tmp_path / "runs" / "out"), *wild], tmp_path)
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("smoke test failed in two steps, two saves, an export")
    assert list((tmp_path / "runs").iterdir()) == []


def leg(folder: Path, loss: float) -> Path:
    (folder / "checkpoints" / "global_step_2").mkdir(parents=True)
    rows = [{"step": step, "loss": loss + step, "grad_norm": 1.0, "step_ms": 5.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_verdict_compares_the_repeated_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, same = leg(tmp_path / "a", 1.0), leg(tmp_path / "b", 1.0)
    near, far = leg(tmp_path / "c", 1.0 + 1e-9), leg(tmp_path / "d", 1.1)
    assert _judge(first, same, exact=True) == 0 and "passed" in capsys.readouterr().out
    assert _judge(first, near, exact=True) == 1
    assert "step 2 has loss 3.0" in capsys.readouterr().out
    assert _judge(first, near, exact=False) == 0 and _judge(first, far, exact=False) == 1


def test_its_settings_make_a_short_run_of_any_other(tmp_path: Path, assets: Path) -> None:
    long = [
        "training.eval_steps=5", "data.val_size=0.1", "training.keep_best_checkpoint=true",
        "training.load_best_model_at_end=true", "training.save_steps=50", "training.export_steps=100",
        "training.save_only_model=true",
    ]  # fmt: skip
    given = [*words(assets, tmp_path / "out"), *long]
    config = load_config([*given, *_overrides(load_config(given), tmp_path / "first", 2)]).config
    training = config.training
    assert (training.max_steps, training.save_steps, training.save_only_model) == (2, 1, False)
    assert training.output_dir == str(tmp_path / "first") and not config.data.val_size
    # Two steps of eight rows on each of two ranks are 32 rows; a few more are read.
    assert config.data.max_samples == 64


def test_it_is_for_one_machine(tmp_path: Path, assets: Path) -> None:
    loaded = load_config(words(assets, tmp_path / "out"))
    with pytest.raises(UserError, match="--smoke tries a run on one machine"):
        smoke(loaded, [], 2, Launch(nnodes=2))
