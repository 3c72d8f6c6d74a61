"""``shardyard checkpoint``: what a user sees, and what is left after it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from shardyard.checkpoint import CheckpointStore
from shardyard.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved in the order 5, 20, 10; 20 is the best one; 3 is cut short, and a save was killed."""
    out = tmp_path_factory.mktemp("saved")
    store = CheckpointStore(out, save_total_limit=None)
    for step in (5, 20, 10):
        model = torch.nn.Linear(4, 4, bias=False)
        store.save(step, model=model, optimizer=None, run_state={"step": step}, best=step == 20)
    (store.folder / "global_step_3").mkdir()
    (store.folder / "global_step_3" / "__0_0.distcp").write_bytes(b"x" * 100)
    (store.folder / ".tmp-global_step_11").mkdir()
    (store.folder / "global_step_20" / "hf").mkdir()
    return out


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def verb(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def grow_old(run: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for path in (run / "checkpoints").rglob("*"):
        os.utime(path, (then, then))


CHECKPOINTS = [f"global_step_{step}" for step in (10, 20, 3, 5)]
ALL = [".tmp-global_step_11", "best", *CHECKPOINTS, "latest"]


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_list_shows_the_order_of_saves_the_marks_and_what_is_incomplete(run, capsys, folder):
    code, out, err = verb(capsys, "list", run / folder)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == [
        "checkpoint", "global_step_5", "global_step_20", "global_step_10", "global_step_3",
        ".tmp-global_step_11:",
    ]  # fmt: skip
    assert [line[1] for line in lines[1:4]] == ["1", "2", "3"]
    assert [line[-1] for line in lines[1:4]] == ["complete", "hf", "latest"]
    assert lines[2][-2:] == ["best", "hf"] and "ago)" in lines[1] and lines[1][-2] == "1"
    assert "has no manifest.json" in out


def test_list_takes_one_checkpoint_and_the_pointers(run, capsys):
    for name in ("global_step_10", "latest"):
        out = verb(capsys, "list", run / "checkpoints" / name)[1]
        assert "global_step_10" in out and "global_step_5" not in out


def test_verify_is_content_with_whole_ones(run, capsys):
    code, out, _ = verb(capsys, "verify", run / "checkpoints" / "global_step_20")
    assert code == 0 and "3 files" in out and "as they were written" in out


def test_verify_names_every_damaged_file_in_one_message(run, capsys):
    first, second = (run / "checkpoints" / f"global_step_{step}" for step in (5, 10))
    data = bytearray((first / "__0_0.distcp").read_bytes())
    data[100] ^= 4
    (first / "__0_0.distcp").write_bytes(data)
    (first / "run_state.json").unlink()
    (second / ".metadata").write_bytes(b"")
    code, out, err = verb(capsys, "verify", run)
    assert code == 2 and err.startswith("error: ") and err.count("error:") == 1
    assert "global_step_20" in out and "global_step_5" not in out
    lines = err.splitlines()[1:]
    assert len(lines) == 4  # the cut one, two files of the first, one of the second
    for path, name in ((first, "__0_0.distcp"), (first, "run_state.json"), (second, ".metadata")):
        assert sum(str(path) in line and name in line for line in lines) == 1


def test_prune_keeps_the_newest_saves_and_the_best(run, capsys):
    code, out, _ = verb(capsys, "prune", run, "--keep", "1")
    assert code == 0 and "removed" in out and "global_step_5" in out
    assert left(run) == [name for name in ALL if name != "global_step_5"]
    assert verb(capsys, "prune", run, "--keep=1")[1].startswith("0 gone, 2 complete left")


def test_prune_tells_and_leaves_all_in_a_dry_run(run, capsys):
    grow_old(run, 2)
    code, out, _ = verb(capsys, "prune", run, "--keep", "1", "--dry-run", "--incomplete")
    assert code == 0 and left(run) == ALL and "removed" not in out
    assert out.count("would remove") == 3 and "3 would go, 2 complete left" in out


def test_prune_leaves_what_a_run_may_be_writing(run, capsys):
    out = verb(capsys, "prune", run, "--keep", "3", "--incomplete")[1]
    assert left(run) == ALL and out.count("a run may be saving") == 2
    grow_old(run, 0.9)
    verb(capsys, "prune", run, "--keep", "3", "--incomplete")
    assert left(run) == ALL
    grow_old(run, 1.1)
    out = verb(capsys, "prune", run, "--keep", "3", "--incomplete")[1]
    assert left(run) == ["best", "global_step_10", "global_step_20", "global_step_5", "latest"]
    assert "2 gone, 3 complete left" in out and "(100 bytes)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["delete", "RUN"], "'delete' is not list, verify or prune"),
        (["list"], "takes one folder, not 0"),
        (["list", "RUN", "RUN"], "takes one folder, not 2"),
        (["list", "RUN", "--all"], "--all is unknown"),
        (["list", "RUN/nothing"], "is no folder"),
        (["verify", "RUN/empty"], "holds no checkpoints"),
        (["prune", "RUN"], "--keep N"),
        (["prune", "RUN", "--keep", "0"], "a whole number from 1 on"),
        (["prune", "RUN", "--keep", "-1"], "a whole number from 1 on"),
        (["prune", "RUN/checkpoints/global_step_5", "--keep", "1"], "not one checkpoint"),
        (["verify", "RUN/checkpoints/best"], "names no complete checkpoint"),
    ],
)
def test_mistakes_get_one_message_and_change_nothing(run, capsys, words, message):
    (run / "empty").mkdir()
    if words[-1].endswith("best"):
        (run / "checkpoints" / "best").write_text("../../etc")
    code, out, err = verb(capsys, *(word.replace("RUN", str(run)) for word in words))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert left(run) == ALL


def test_help_is_one_page_and_the_verb_is_listed(capsys):
    assert main(["checkpoint", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("list DIR", "verify DIR", "prune DIR --keep N"))
    assert main(["--help"]) == 0 and "checkpoint" in capsys.readouterr().out
