"""Each script runs in small, ends well and prints tables whose losses agree. No time is asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import Script


@pytest.fixture
def words(assets: Path, tmp_path: Path) -> list[str]:
    """A short run of the quick start."""
    return [
        f"model.model_name_or_path={assets / 'model'}", f"data.dataset={assets / 'alpaca.parquet'}",
        f"model.cache_dir={tmp_path / 'cache'}", "training.per_device_train_batch_size=4",
    ]  # fmt: skip


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(text: str, first_cell: str) -> dict[str, list[str]]:
    """The rows of the table whose head begins with ``first_cell``, by their first cell."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("|") and cells(line)[0] == first_cell)
    rows: dict[str, list[str]] = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows[cells(line)[0]] = cells(line)[1:]
    return rows


def test_throughput_beside_transformers_trainer(script: Script, words: list[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = script(
        "throughput.py", "--here", "--peers", "trainer", "--steps", "2", "--threads", "1",
        "--json", str(figures), *words, "training.gradient_accumulation_steps=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout, "")
    assert list(rows) == ["shardyard", "trainer"]
    assert float(rows["trainer"][-1]) <= 1e-4
    ours, theirs = json.loads(figures.read_text())
    assert len(ours["steps"]) == len(theirs["steps"]) == 3
    assert [step["tokens"] for step in ours["steps"]] == [step["tokens"] for step in theirs["steps"]]
    assert all(step["tokens"] > 0 and step["peak_bytes"] > 0 for step in ours["steps"])
    assert ours["steps"][0]["loss"] != ours["steps"][1]["loss"]
    assert ours["facts"]["torch"] == theirs["facts"]["torch"]


@pytest.mark.soak
def test_pretraining_windows_have_the_same_loss_with_the_trainer(
    script: Script, words: list[str], assets: Path
) -> None:
    entry = json.dumps({"file_name": str(assets / "alpaca.parquet"), "columns": {"text": "output"}})
    done = script(
        "throughput.py", "--here", "--peers", "trainer", "--steps", "2", "--threads", "1", *words,
        f"data.dataset={entry}", "training.stage=pt", "data.data_manager_type=mg", "data.cutoff_len=24",
        "data.template=null",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(table(done.stdout, "")["trainer"][-1]) <= 1e-4


@pytest.mark.soak
def test_ablation_of_two_levers_and_one_that_is_not_to_be_had(script: Script, words: list[str]) -> None:
    done = script(
        "ablation.py", "--only", "recompute-full,rows-end-to-end,fused-rmsnorm", "--steps", "1",
        "--threads", "1", *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout, "lever")
    assert list(rows) == ["fused-rmsnorm", "rows-end-to-end", "recompute-full"]
    for name in ("rows-end-to-end", "recompute-full"):
        assert float(rows[name][4]) <= float(rows[name][5])
    assert float(rows["recompute-full"][1].removesuffix(" x")) < 1  # fewer activations were alive


@pytest.mark.soak
def test_ablation_says_that_a_changed_loss_is_one(script: Script, words: list[str]) -> None:
    """bf16 must differ in the last digits: a table that shows 0 has compared a run with itself."""
    done = script("ablation.py", "--only", "bf16", "--steps", "1", "--threads", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < float(table(done.stdout, "lever")["bf16"][4]) <= 5e-2


@pytest.mark.soak
def test_mfu_sets_the_steps_operations_against_the_products_peak(script: Script, words: list[str]) -> None:
    done = script("mfu.py", "--tiny", "--steps", "2", "--threads", "1", "--peak-seconds", "0.1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = table(done.stdout, "")
    assert 0 < float(figures["achieved / peak"][0]) < 1
    shares = table(done.stdout, "operators")
    assert {"matrix products", "attention", "optimizer"} <= shares.keys()
    assert sum(float(cells[1].removesuffix("%")) for cells in shares.values()) == pytest.approx(100, abs=4)


@pytest.mark.soak
def test_scaling_over_ranks_and_sizes(script: Script, assets: Path) -> None:
    done = script(
        "scaling.py", "--model", str(assets / "model"), "--base", "32,2,2", "--length", "32,64",
        "--layers", "1,2", "--rows", "2,4", "--steps", "1", "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    both = table(done.stdout, "")
    assert list(both) == ["1 process, 2 threads", "2 ranks, 1 thread"]
    assert float(both["2 ranks, 1 thread"][-1]) <= 1e-4
    assert len(re.findall(r"over all points: seconds grow as \w+ \*\* -?[\d.]+", done.stdout)) == 3


@pytest.mark.soak
def test_the_gpu_script_runs_in_small_and_its_ways_agree(script: Script, tmp_path: Path) -> None:
    done = script("gpu.py", "--tiny", "--steps", "2", "--seconds", "3000", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "out" / "gpu.json").read_text())
    rows = {row["way"]: row for row in figures["rows"]}
    assert rows["as it comes"]["mfu"] > 0
    done_rows = [row for row in rows.values() if not row["why"]]
    assert len(done_rows) >= 4
    first, last = done_rows[0]["first_loss"], done_rows[0]["last_loss"]
    for row in done_rows:  # the plain loop too: all begin with the same weights
        assert row["first_loss"] == pytest.approx(first, abs=1e-4), row["way"]
        assert row["last_loss"] == pytest.approx(last, abs=1e-3), row["way"]
    assert (tmp_path / "out" / "gpu.md").read_text() in done.stdout
