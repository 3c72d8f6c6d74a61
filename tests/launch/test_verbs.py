"""The command itself: help, unknown words, and a user's mistakes, all without loading torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardyard import __version__

ROOT = Path(__file__).resolve().parents[2]
# Runs the verb in a process of its own and fails if it loaded torch or transformers.
PROBE = """
import sys
from shardyard.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def shardyard(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, cwd=cwd, timeout=60
    )


def test_help_lists_the_verbs_that_work() -> None:
    done = shardyard("--help")
    assert done.returncode == 0 and done.stderr == ""
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == [
        "train",
        "check",
        "data",
        "preprocess",
        "convert",
        "evaluate",
        "checkpoint",
        "generate",
        "serve",
        "chat",
        "schema",
        "env",
    ]


def test_version() -> None:
    done = shardyard("--version")
    assert (done.returncode, done.stdout) == (0, f"shardyard {__version__}\n")


@pytest.mark.parametrize("verb", ["train", "check", "data", "generate", "evaluate", "serve", "env"])
def test_each_verb_explains_itself(verb: str) -> None:
    done = shardyard(verb, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: shardyard {verb}")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian", "a.yaml"], "did you mean train?"),
        (
            ["frobnicate"],
            "there are train, check, data, preprocess, convert, evaluate, checkpoint, generate, serve, chat, "
            "schema, env",
        ),
        (["tune.yaml"], "shardyard train tune.yaml"),
        (["env", "extra"], "'extra'"),
        (["train"], "name a YAML file"),
        (["train", "no_such_file.yaml"], "no_such_file.yaml"),
        (["train", "a.yaml", "--nproc-per-node"], "--nproc-per-node needs a value"),
        (["train", "a.yaml", "--nproc_per_node=two"], "--nproc-per-node two: a whole number from 1 on"),
        (["train", "a.yaml", "--nproc-per-node", "0"], "a whole number from 1 on"),
        (["train", "a.yaml", "--nnodes", "2"], "needs --node-rank and --master-addr"),
        (
            ["train", "a.yaml", "--nnodes=2", "--node-rank=2", "--master-addr=a"],
            "--node-rank 2 with --nnodes 2",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words: list[str], part: str, tmp_path: Path) -> None:
    done = shardyard(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_train_checks_the_configuration_before_anything_else(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model:\n  model_name_or_path: m\ntraining:\n  learning_rate_typo: 1\n", encoding="utf-8"
    )
    done = shardyard("train", str(config), "--nproc-per-node", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{config}:4" in done.stderr and "learning_rate_typo" in done.stderr


def test_train_refuses_a_world_that_the_mesh_cannot_use(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {model_name_or_path: m}\ndata: {dataset: d.json}\nparallel: {fsdp_size: 8}\n"
        "training: {output_dir: out}\n",
        encoding="utf-8",
    )
    done = shardyard("train", str(config), "--nproc-per-node", "3", cwd=tmp_path)
    assert done.returncode == 2 and "fsdp_size" in done.stderr and "3" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "shardyard", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(timeout=60)


def test_env_reports_versions_and_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", "env"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert report["shardyard"] == __version__
    assert {"python", "torch", "transformers", "cpu", "accelerators"} <= set(report)
