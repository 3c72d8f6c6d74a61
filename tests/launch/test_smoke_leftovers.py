"""What a smoke test makes of numbers that are none, and of one before it that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.cli import smoke as smoke_verb
from shardyard.cli.launch import Launch
from shardyard.cli.smoke import _judge, smoke
from shardyard.durable import temporary_name


def leg(folder: Path, loss: float | str) -> Path:
    folder.mkdir()
    row = {"step": 2, "loss": loss, "grad_norm": 1.0, "step_ms": 5.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_that_is_no_number_fails_though_it_comes_twice(
    tmp_path: Path, exact: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # With training.on_nonfinite: skip a run goes on, and metrics.jsonl says "nan" as text.
    first, second = leg(tmp_path / "a", "nan"), leg(tmp_path / "b", "nan")
    assert _judge(first, second, exact=exact) == 1
    assert "smoke test failed: step 2 has loss 'nan'" in capsys.readouterr().out


def test_what_a_killed_one_has_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = temporary_name(tmp_path / ".smoke").name
    left, own = tmp_path / name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"), tmp_path / name
    for folder in (left, own):  # the other one's process, this one, lives
        (folder / "first").mkdir(parents=True)
    loaded: Any = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(output_dir=str(tmp_path / "out")))
    )

    def give_up(*arguments: Any) -> list[str]:
        assert not left.exists() and own.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke_verb, "_overrides", give_up)
    with pytest.raises(KeyboardInterrupt):
        smoke(loaded, [], 1, Launch())
    assert list(tmp_path.iterdir()) == [own]
