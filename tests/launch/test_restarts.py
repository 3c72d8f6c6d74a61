"""Another start after a fault: who asks for it, whose folder it is, and where it goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.nodes import PYTHON, Machine, Process
from support.ranks import RankPool
from support.whole_runs import YAML, train, write_numbered, write_workspace

from shardyard.config import load_config
from shardyard.device import restart, restarted_since
from shardyard.errors import UserError
from shardyard.train.run_folder import claim_output_dir, look_at_output_dir

LAUNCH = """
import sys
from shardyard.cli.train import Launch, start_ranks
sys.exit(start_ranks([sys.executable, "-u", "rank.py"], 2, Launch(max_restarts=int(sys.argv[1]))))
"""
FAIL_TWICE = """
import os, sys, time
from pathlib import Path
rank, start = os.environ["RANK"], os.environ["SHARDYARD_START"]
Path(f"start{start}.rank{rank}").write_text(os.environ["SHARDYARD_LAUNCHED"])
while not all(Path(f"start{start}.rank{other}").exists() for other in "01"):
    time.sleep(0.02)
if rank == "1" and int(start) < 2:
    sys.exit(7)
time.sleep(600 if int(start) < 2 else 0)
"""
MISTAKE = """
from shardyard.cli.rank import guard
from shardyard.errors import UserError
def work(): raise UserError("data.dataset: no such file")
guard(work)
"""


def start(folder: Path, script: str, restarts: int) -> tuple[int, str]:
    (folder / "rank.py").write_text(script, encoding="utf-8")
    run = Process(Machine(), [*PYTHON, "-c", LAUNCH, str(restarts)], folder, "launch")
    return run.wait(), run.text()


def test_all_ranks_are_started_again_until_the_run_is_complete(tmp_path: Path) -> None:
    began = time.time()
    code, log = start(tmp_path, FAIL_TWICE, 2)
    assert code == 0, log
    assert log.count("ended with exit code 7; the other ranks were ended\n") == 2
    assert [line for line in log.splitlines() if "restart" in line] == [
        "starting all ranks again: restart 1 of 2",
        "starting all ranks again: restart 2 of 2",
    ]
    notes = sorted(path.name for path in tmp_path.glob("start*"))
    assert notes == [f"start{number}.rank{rank}" for number in range(3) for rank in range(2)]
    launched = {float(path.read_text()) for path in tmp_path.glob("start*")}
    assert len(launched) == 1 and began <= launched.pop() <= time.time()


@pytest.mark.soak
def test_the_last_fault_is_the_launchers_end(tmp_path: Path) -> None:
    code, log = start(tmp_path, FAIL_TWICE, 1)
    assert code == 1 and log.count("ended with exit code 7") == 2 and log.count("starting all") == 1


def test_a_mistake_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    code, log = start(tmp_path, MISTAKE, 3)
    assert (code, log) == (2, "error: data.dataset: no such file\n")


def test_the_first_start_of_a_launch_is_no_restart() -> None:
    assert restarted_since({}) is None
    assert restarted_since({restart.START: "0", restart.LAUNCHED: "12.5"}) is None
    assert restarted_since({"TORCHELASTIC_RESTART_COUNT": "0"}) is None


def test_a_restart_knows_when_its_launch_began() -> None:
    assert restarted_since({restart.START: "2", restart.LAUNCHED: "12.5"}) == 12.5
    since = restarted_since({"TORCHELASTIC_RESTART_COUNT": "1"})  # torch's: its launcher is our parent
    started = Path(f"/proc/{os.getppid()}").stat().st_ctime
    assert since is not None and since <= time.time() and abs(since - started) < 3600


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A workspace with a run ``out`` that has saved steps 2 and 4."""
    folder = write_workspace(tmp_path_factory.mktemp("restarts"))
    write_numbered(folder / "rows.jsonl", range(8))
    train(ranks, folder, "out", "--training.max_steps", "4")
    return folder


def look(folder: Path, *words: str) -> str:
    """The checkpoint from which the run in ``out`` would go on, by its number; "" for step 0."""
    config = folder / "look.yaml"
    config.write_text(YAML.format(folder=folder, out=folder / "out"), encoding="utf-8")
    found = look_at_output_dir(load_config([str(config), *words]).config)
    return Path(found).name.removeprefix("global_step_") if found else ""


def touch(path: Path, when: float) -> None:
    os.utime(path, (when, when))


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is the second start of a launch that began before the run in ``out`` did."""
    monkeypatch.setenv(restart.START, "1")
    monkeypatch.setenv(restart.LAUNCHED, "1.0")
    return monkeypatch


def test_a_restart_goes_on_from_the_newest_checkpoint_of_its_own(
    trained: Path, restarted: pytest.MonkeyPatch
) -> None:
    assert look(trained) == "4"
    assert look(trained, "--training.overwrite_output_dir", "true") == "4"
    assert look(trained, "--training.resume_from_checkpoint", "latest") == "4"


def test_a_first_start_and_a_run_older_than_the_launch_are_refused_as_ever(
    trained: Path, restarted: pytest.MonkeyPatch
) -> None:
    restarted.setenv(restart.LAUNCHED, str(time.time() + 60))
    with pytest.raises(UserError, match="holds another run"):
        look(trained)
    assert (
        look(trained, "--training.overwrite_output_dir", "true") == ""
    )  # it will be moved aside, not resumed
    restarted.setenv(restart.START, "0")
    restarted.setenv(restart.LAUNCHED, "1.0")
    with pytest.raises(UserError, match="holds another run"):
        look(trained)


def test_a_run_sent_back_to_an_earlier_checkpoint_does_not_jump_to_those_it_left_behind(
    trained: Path, restarted: pytest.MonkeyPatch
) -> None:
    earlier = trained / "out" / "checkpoints" / "global_step_2"
    back = ("--training.resume_from_checkpoint", str(earlier))
    newest = trained / "out" / "checkpoints" / "global_step_4" / "manifest.json"
    restarted.setenv(restart.LAUNCHED, str(newest.stat().st_mtime + 1))
    claim = trained / "out" / "resolved_config.yaml"
    touch(claim, newest.stat().st_mtime + 5)  # the launch began after step 4 was saved, then claimed
    assert look(trained, *back) == "2"
    touch(newest, newest.stat().st_mtime + 9)  # as if step 4 had been saved once more since
    assert look(trained, *back) == "4"


def test_a_restart_without_a_checkpoint_begins_anew_in_its_own_folder(
    tmp_path: Path, restarted: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(YAML.format(folder=tmp_path, out=tmp_path / "out"), encoding="utf-8")
    loaded = load_config([str(config)])
    restarted.setenv(restart.LAUNCHED, str(time.time() - 1))
    claim_output_dir(loaded)
    assert look_at_output_dir(loaded.config) == ""
    claim_output_dir(loaded)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]  # nothing was moved aside
