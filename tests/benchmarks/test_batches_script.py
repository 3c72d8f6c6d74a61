"""benchmarks/batches.py: its counts against ones worked out by hand, and its race in small."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from .conftest import Script
from .test_scripts import table


def test_counts_of_a_batch_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 6, 3 and 3 tokens on two ranks: 6 beside 3 + 3, in one micro-batch of at most 6 tokens, in two
    of at most 3, where the long row meets a row of 3, a rank of two rows has another one, and one has none.
    """
    (tmp_path / "lengths.json").write_text(json.dumps([3, 6, 3]))
    words = [
        "--lengths",
        str(tmp_path / "lengths.json"),
        "--ranks",
        "2",
        "--rows",
        "2",
        "--accumulation",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["batches.py", *words, "--budgets", "6", "3", "--hidden-size", "100000"])
    assert importlib.import_module("batches").main() == 0
    rows = table(capsys.readouterr().out, "cut")
    assert rows["6 tokens"] == ["1.0", "0.0%", "6", "1.000", "0.0%"]
    # 6 and 3, then nothing and 3: 9 of the 12 and 3 of the 6 units of time are worked.
    assert rows["3 tokens"] == ["2.0", "25.0%", "6", "1.000", "33.3%"]
    assert rows["by length"][:2] == ["1.0", "0.0%"]
    assert list(rows) == ["2 rows", "by length", "6 tokens", "3 tokens"]


@pytest.mark.soak
def test_a_race_of_two_ranks(script: Script, assets: Path, tmp_path: Path) -> None:
    done = script(
        "batches.py", "--race", "--steps", "1", "--budget", "64",
        f"model.model_name_or_path={assets / 'model'}", f"data.dataset={assets / 'alpaca.parquet'}",
        f"model.cache_dir={tmp_path / 'cache'}", "training.per_device_train_batch_size=4",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout, "cut")
    assert list(rows) == ["in order", "by length", "by tokens"]
    assert all(float(row[-1]) <= 1e-4 and float(row[0]) > 0 for row in rows.values())
