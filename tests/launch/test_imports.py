"""What is loaded, and when: verbs that need no torch answer without it, and a start is told before that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = str(ROOT / "examples" / "quickstart" / "tune_tiny_qwen3.yaml")
HEAVY = {
    "torch", "transformers", "numpy", "pyarrow", "accelerate", "sympy", "huggingface_hub", "tokenizers",
}  # fmt: skip
OPTIONAL = {
    "pandas", "datasets", "peft", "torchao", "tensorboard", "sklearn", "matplotlib", "modelscope",
    "liger_kernel", "wandb", "swanlab", "mlflow", "bitsandbytes", "deepspeed",
}  # fmt: skip
"""What no run loads, unless it uses it."""
PROBE = """
import contextlib, io, json, sys
from shardyard.cli import main

found = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    found[" ".join(words)] = [code, sorted(set(json.loads(sys.argv[2])) & set(sys.modules))]
print(json.dumps(found))
"""


def test_verbs_that_need_no_torch_load_nothing_heavy(tmp_path: Path) -> None:
    import torch

    from shardyard.checkpoint import CheckpointStore

    store = CheckpointStore(tmp_path, save_total_limit=None)
    for step in (1, 2):
        store.save(step, model=torch.nn.Linear(2, 2), optimizer=None, run_state={"step": step})
    run = str(tmp_path)
    jobs = [
        ["--help"],
        *(
            [verb, "--help"]
            for verb in ("train", "check", "data", "preprocess", "convert", "checkpoint", "env")
        ),
        ["schema"],
        ["check", QUICK_START],
        ["check", QUICK_START, "--world-size", "2"],
        ["check", "--explain", "optimization.compile"],
        ["checkpoint", "list", run],
        ["checkpoint", "verify", run],
        ["checkpoint", "prune", run, "--keep", "1"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(jobs), json.dumps(sorted(HEAVY))],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {" ".join(words): [0, []] for words in jobs}
    assert [path.name for path in store.folder.glob("global_step_*")] == ["global_step_2"]


def _loaded_by_a_run() -> list[str]:
    import shardyard.cli.rank
    import shardyard.train

    assert shardyard.train.run is not None and shardyard.cli.rank.run_rank is not None
    return sorted(OPTIONAL & set(sys.modules))


def test_a_run_loads_nothing_that_it_does_not_use(ranks) -> None:
    assert ranks.run(1, _loaded_by_a_run) == [[]]


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("shardyard", ["train"], "is valid; starting 2 rank(s) on this machine ..."),
        ("shardyard.cli.rank", [], "2 rank(s) have started and load torch and transformers"),
    ],
)
def test_a_start_is_told_before_anything_heavy_is_loaded(
    tmp_path: Path, module: str, words: list[str], said: str
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is loaded')", encoding="utf-8")
    options = ["--nproc-per-node", "2"] if words else []
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", module, *words, QUICK_START, *options],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "RANK": "0", "WORLD_SIZE": "2"},
    )  # fmt: skip
    assert done.returncode == 1 and "torch is loaded" in done.stderr
    assert said in done.stdout
