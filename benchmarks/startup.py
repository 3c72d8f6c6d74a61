"""From the command to the first step: what a run adds to importing torch and transformers.

    python benchmarks/startup.py [--rounds 5] [--threads N]

The quick start's model and rows, one process on a CPU. The ways take turns, each once a round, and the least
of all rounds is printed: by the clock, until the line of step 1 is there, and in processor seconds (user and
system, of all processes of that way, their end included), which a busy machine disturbs less. The last table
tells where the time of one run goes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turns import installed_versions, machine, print_table

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
BARE = "import torch; from transformers import Qwen3ForCausalLM, AutoTokenizer"
FIRST_STEP = "iteration        1/"
LIMIT_S = 3.0
"""What the issue allows above the bare import."""
PHASES = {
    "> Building Tokenizer...": "device, process group, a look at the run folder",
    "> Building DataFactory...": "config.json and tokenizer",
    "> Building FSDP2 Model...": "data, from the cache",
    "> Building Optimizer...": "model: class, shards, weights, self-test",
    "> Building Checkpointer...": "optimizer, start-up table",
    "> Building Monitor...": "check of the export, run folder, disk space",
}
"""Lines of the log -> what ends with each."""


@dataclass(frozen=True)
class Cost:
    """Seconds by the clock and of processors."""

    wall: float
    cpu: float

    def least(self, other: Cost) -> Cost:
        return Cost(min(self.wall, other.wall), min(self.cpu, other.cpu))


def main() -> int:
    options = _options()
    if options.child is not None:
        return tell_phases(options.child, options.words)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="startup-") as root:
        assets = _assets(Path(root))
        warm = _words(Path(root), assets, Path(root) / "cache")
        cold = _words(Path(root), assets, Path(root) / "cold")
        train = str(ROOT / "train_fsdp2.py")
        ways: dict[str, list[str]] = {
            "bare import": ["-c", BARE],
            "train_fsdp2.py": [train, *warm],
            "the same, rows tokenised in it": [train, *cold],
            "torchrun, 1 rank": ["-m", "torch.distributed.run", "--nproc_per_node", "1", train, *warm],
            "shardyard train, 1 rank": ["-m", "shardyard", "train", *warm, "--nproc-per-node", "1"],
        }
        found = take_turns(ways, options.rounds, Path(root) / "cold")
        phases = _phases(warm)
    _print(found, phases, options)
    return 0


def _options() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when its parent started it
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _assets(root: Path) -> Path:
    """The quick start's model and rows, copied or made."""
    made, assets = QUICKSTART / "assets", root / "assets"
    if made.exists():
        shutil.copytree(made, assets)
    else:
        subprocess.run([sys.executable, str(QUICKSTART / "make_assets.py"), str(assets)], check=True)
    return assets


def _words(root: Path, assets: Path, cache: Path) -> list[str]:
    """The quick start's file and what this benchmark sets: one step, and nothing written at the end of it."""
    settings = {
        "model.model_name_or_path": assets / "model",
        "data.dataset": assets / "alpaca.parquet",
        "model.cache_dir": cache,
        "training.output_dir": root / "run",
        "training.max_steps": 1,
        "training.logging_steps": 1,
        "training.save_steps": 0,
        "training.save_hf_weights": "false",
    }
    return [str(QUICKSTART / "tune_tiny_qwen3.yaml"), *(f"{key}={value}" for key, value in settings.items())]


def take_turns(ways: dict[str, list[str]], rounds: int, cold: Path) -> dict[str, Cost]:
    """The least cost of each way; ``cold`` is emptied before each run."""
    found: dict[str, Cost] = {}
    for _ in range(rounds):
        for name, words in ways.items():
            shutil.rmtree(cold, ignore_errors=True)
            cost = cost_of(words, until="" if name == "bare import" else FIRST_STEP)
            found[name] = cost.least(found.get(name, cost))
            print(f"{name}: {cost.wall:.2f} s, {cost.cpu:.2f} processor seconds", file=sys.stderr)
    return found


def cost_of(words: Sequence[str], until: str) -> Cost:
    """Of ``python WORDS``: by the clock until a line holds ``until`` ("" is the end), processors to the end.

    Raises:
        RuntimeError: the process failed, or never printed such a line.
    """
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    wall, lines = None, []
    for line in process.stdout:
        lines.append(line)
        if until and until in line and wall is None:
            wall = time.perf_counter() - started
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not until:
        wall = time.perf_counter() - started
    if process.returncode or wall is None:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{''.join(lines[-20:])}")
    return Cost(wall, usage.ru_utime + usage.ru_stime)


def _phases(words: Sequence[str]) -> list[tuple[str, Cost]]:
    command = [sys.executable, __file__, "--child", repr(time.perf_counter()), "--", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    marks = json.loads(done.stdout.splitlines()[-1])
    return [(name, Cost(wall, cpu)) for name, wall, cpu in marks]


def tell_phases(started: float, words: Sequence[str]) -> int:
    """In a process of its own: run, and print how long each phase took, as JSON."""
    marks: list[tuple[str, float, float]] = []
    last = [started, 0.0]

    def mark(name: str) -> None:
        now = time.perf_counter(), time.process_time()
        marks.append((name, now[0] - last[0], now[1] - last[1]))
        last[:] = now

    mark("Python itself")
    from shardyard.config import load_config

    loaded = load_config(list(words))
    mark("settings: pydantic, YAML, rules")
    import torch  # noqa: F401

    mark("import torch")
    import transformers.modeling_utils  # noqa: F401

    mark("import transformers")
    from shardyard.train import run

    mark("import the rest of torch that is used, and Shardyard")
    _mark_log(mark)
    seen: list[object] = []

    def observe(record: object) -> None:
        seen.append(record)
        mark("monitor, batches" if len(seen) == 1 else "first step")

    code = run(loaded, observe=observe)
    print(json.dumps(marks))
    return code


def _mark_log(mark) -> None:
    import logging

    class Marks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if phase := PHASES.get(record.getMessage()):
                mark(phase)

    package = logging.getLogger("shardyard")
    package.setLevel(logging.INFO)
    package.addHandler(Marks())


def _print(found: dict[str, Cost], phases: list[tuple[str, Cost]], options: argparse.Namespace) -> None:
    bare = found["bare import"]
    versions = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
    print(f"{machine()}; {options.threads} threads; {versions}; least of {options.rounds}\n")
    rows = [
        [name, f"{cost.wall:.2f}", f"{cost.wall - bare.wall:+.2f}", f"{cost.cpu:.2f}",
         f"{cost.cpu - bare.cpu:+.2f}"]
        for name, cost in found.items()
    ]  # fmt: skip
    print_table(["to the first step", "seconds", "above bare", "processor seconds", "above bare"], rows)
    over = found["train_fsdp2.py"].wall - bare.wall
    print(f"\ntrain_fsdp2.py: {over:+.2f} s above the bare import, {LIMIT_S:g} allowed\n")
    print_table(
        ["one run of train_fsdp2.py", "seconds", "processor seconds"],
        [[name, f"{cost.wall:.2f}", f"{cost.cpu:.2f}"] for name, cost in phases],
    )


if __name__ == "__main__":
    sys.exit(main())
