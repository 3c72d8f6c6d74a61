"""How one rank ends: what it prints, its exit code, and what it leaves for the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rank(body: str, tmp_path: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run ``body`` (the inside of a function) under guard; returns the process and the seconds it took."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    script = (
        f"from shardyard.cli.rank import guard\nimport sys\ndef work():\n{lines}\nsys.exit(guard(work))\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **env},
    )  # fmt: skip
    return done, time.monotonic() - started


def test_a_fault_is_one_block_with_rank_step_cause_and_trace(tmp_path: Path) -> None:
    body = """\
error = ValueError("shapes differ")
error.add_note("in step 3")
print("so far", end="")
raise error"""
    done, _ = rank(body, tmp_path, RANK="5", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == 1 and done.stdout == "so far"
    head, *rest = done.stderr.splitlines()
    assert head.startswith("rank 5 (") and head.endswith("failed in step 3: ValueError: shapes differ")
    assert rest[0].startswith("Traceback")
    written = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert written["message"]["message"] == "failed in step 3: ValueError: shapes differ"


def test_a_fault_does_not_wait_for_threads_exit_handlers_or_children(tmp_path: Path) -> None:
    body = """\
import atexit, multiprocessing, threading, time
atexit.register(time.sleep, 30)
threading.Thread(target=time.sleep, args=(30,)).start()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,)).start()
raise RuntimeError("bad")"""
    done, seconds = rank(body, tmp_path)
    assert done.returncode == 1 and "RuntimeError: bad" in done.stderr
    assert seconds < 10


def test_a_users_mistake_is_told_at_once_by_rank_0(tmp_path: Path) -> None:
    body = "from shardyard.errors import UserError\nraise UserError('model.x: no such folder')"
    done, seconds = rank(body, tmp_path, RANK="0", WORLD_SIZE="4")
    assert (done.returncode, done.stderr) == (2, "error: model.x: no such folder\n")
    assert seconds < 3


def test_a_mistake_of_another_rank_alone_is_told_too(tmp_path: Path) -> None:
    body = "from shardyard.errors import UserError\nraise UserError('disk full')"
    done, seconds = rank(body, tmp_path, RANK="1", LOCAL_RANK="1", WORLD_SIZE="4")
    assert (done.returncode, done.stderr) == (2, "error: disk full\n")
    assert seconds >= 3  # rank 0 could have spoken


def test_a_lost_rank_is_not_blamed_on_the_one_that_notices(tmp_path: Path) -> None:
    body = """\
from shardyard.cli import rank
rank._LAUNCHER_SECONDS = 0.1
raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:19334")"""
    done, _ = rank(body, tmp_path, RANK="2", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == 1
    assert "lost contact with another rank: RuntimeError" in done.stderr and "Traceback" not in done.stderr
    written = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert written["message"]["message"].startswith("lost contact with another rank")


@pytest.mark.parametrize(("body", "code"), [("return 0", 0), ("sys.exit(0)", 0), ("sys.exit(4)", 1)])
def test_exit_codes_of_other_ends(tmp_path: Path, body: str, code: int) -> None:
    done, _ = rank(body, tmp_path)
    assert done.returncode == code


def test_the_entry_script_checks_the_configuration_before_torch(tmp_path: Path) -> None:
    script = (
        "import runpy, sys, os\n"
        f"sys.argv = [{str(ROOT / 'train_fsdp2.py')!r}, 'missing.yaml']\n"
        "leave = os._exit\n"
        "os._exit = lambda code: leave(9 if 'torch' in sys.modules else code)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2 and "missing.yaml" in done.stderr and "Traceback" not in done.stderr
