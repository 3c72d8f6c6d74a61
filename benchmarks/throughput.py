"""Real tokens per second and peak memory, side by side with the trainers that users would pick instead.

    python benchmarks/throughput.py --case alpaca --model SMOLLM2 --data FOLDER # or glaive, pretrain
    python benchmarks/throughput.py [FILE.yaml] [overrides]                      # the quick start's, or yours
    python benchmarks/throughput.py --peers trainer --here                       # a peer in this Python

The contestants train the same rows with the same model, batch size, optimizer, precision and seed, each as
one process with the same number of threads. They take turns step by step (turns.py), so that whatever else
the machine does hits all of them. One step warms up, five are timed. Tokens are the rows' own: padding counts
for nothing. The headline is the ratio of the median steps' tokens per second; tokens of all steps over their
seconds, and tokens per second of the processor (steadier on a machine that others use), stand beside it. The
losses are compared too: equal losses say that all did the same work.

Peers: ``trainer`` is transformers.Trainer, which pads; ``trl`` and ``trl-padding-free`` are TRL's SFTTrainer
as it comes and with ``padding_free=True``, its best setting on a CPU. Each has an environment of its own that
is made on first use from peers/*.txt. Their settings are their own defaults but for those that change the
work (peers/run_peer.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import add_case_options, words_of
from peer_venvs import DEFAULT_FOLDER, REQUIREMENTS, python_of
from turns import MIB, Entry, Result, compete, largest_loss_difference, machine, print_table

HERE = Path(__file__).resolve().parent
LOSS_TOLERANCE = 1e-4
"""Of the issue: the losses of the same rows."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options, rest = _options(parser)
    threads = options.threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(parser, options, rest, steps=options.warm_up + options.steps, folder=folder)
        task = prepare(words, Path(folder), threads)
        entries = [ours(words, threads)]
        for peer in options.peers:
            python = sys.executable if options.here else str(python_of(peer, options.venvs))
            command = [python, str(HERE / "peers" / "run_peer.py"), peer, str(task)]
            entries.append(Entry(peer, command, environment={"OMP_NUM_THREADS": str(threads)}))
        results = compete(entries, steps=options.warm_up + options.steps, warm_up=options.warm_up)
    report(results, threads, options)
    worst = max((largest_loss_difference(results[0], peer) for peer in results[1:]), default=0.0)
    if worst > LOSS_TOLERANCE:
        print(
            f"the losses differ by more than {LOSS_TOLERANCE:.0e}: this was not the same work",
            file=sys.stderr,
        )
        return 1
    return 0


def _options(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    parser.add_argument(
        "--peers", type=_peers, default=["trainer", "trl-padding-free"],
        help=f"of {','.join(REQUIREMENTS)}, separated by commas",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--threads", type=int, help="of each contestant; all cores if not given")
    parser.add_argument(
        "--venvs", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments"
    )
    parser.add_argument("--here", action="store_true", help="run the peers in this Python instead")
    parser.add_argument("--json", type=Path, help="also write every step's figures into this file")
    add_case_options(parser)
    return parser.parse_known_args()


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in REQUIREMENTS]:
        raise argparse.ArgumentTypeError(f"no peer {', '.join(unknown)}; there are {', '.join(REQUIREMENTS)}")
    return names


def ours(
    words: list[str], threads: int, name: str = "shardyard", *, ranks: int = 1, watch_last: bool = False
) -> Entry:
    """Shardyard with a run's words, as an entry."""
    watch = ["--watch-last"] if watch_last else []
    command = [sys.executable, str(HERE / "ours.py"), *watch, *words]
    return Entry(name, command, ranks=ranks, environment={"OMP_NUM_THREADS": str(threads)})


def prepare(words: list[str], folder: Path, threads: int) -> Path:
    """Write the rows and the task for peers; the prepared data stays in the cache for ours."""
    from shardyard.config import load_config

    rows = folder / "rows.json"
    subprocess.run([sys.executable, str(HERE / "peer_rows.py"), str(rows), *words], check=True)
    config = load_config(words).config
    training: dict[str, Any] = config.training.model_dump(mode="json")
    task = folder / "task.json"
    model = config.model.model_name_or_path
    task.write_text(
        json.dumps(
            {
                "model": model, "tokenizer": config.model.tokenizer_name_or_path or model, "rows": str(rows),
                "threads": threads, "training": training,
            }
        ),
        encoding="utf-8",
    )  # fmt: skip
    return task


def report(results: list[Result], threads: int, options: argparse.Namespace) -> None:
    """The table, the ratios, the losses; everything into a file if asked for."""
    print(f"\n{machine()}, {threads} threads; {options.steps} timed steps after {options.warm_up}, in turns")
    for result in results:
        print(f"{result.name}: " + ", ".join(f"{name} {of}" for name, of in result.facts.items()))
    first = results[0]
    header = [
        "",
        "tokens/s",
        "s/step",
        "tokens/step",
        "tokens/CPU-s",
        "peak MiB",
        "ours / it",
        "memory",
        "loss apart",
    ]
    rows = []
    for result in results:
        steps = sorted(step.seconds for step in result.timed)
        rows.append(
            [
                result.name, f"{result.tokens_per_second:.1f}", f"{steps[len(steps) // 2]:.3f}",
                f"{sum(step.tokens for step in result.timed) / len(result.timed):.0f}",
                f"{result.tokens_per_cpu_second:.1f}", f"{result.peak_bytes / MIB:.0f}",
                *([""] * 3 if result is first else _against(first, result)),
            ]
        )  # fmt: skip
    print()
    print_table(header, rows)
    for peer in results[1:]:
        over_all = first.tokens_per_second_over_all / peer.tokens_per_second_over_all
        by_cpu = first.tokens_per_cpu_second / peer.tokens_per_cpu_second
        print(
            f"over all timed steps: {over_all:.2f} x {peer.name}; by the processor's seconds {by_cpu:.2f} x"
        )
    print("losses, step by step:")
    for result in results:
        print(f"  {result.name:<18}" + " ".join(f"{step.loss:.6f}" for step in result.steps))
    if options.json:
        figures = [
            {"name": r.name, "facts": dict(r.facts), "steps": [vars(s) for s in r.steps]} for r in results
        ]
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def _against(first: Result, peer: Result) -> list[str]:
    return [
        f"{first.tokens_per_second / peer.tokens_per_second:.2f} x",
        f"{first.peak_bytes / peer.peak_bytes:.2f} x",
        f"{largest_loss_difference(first, peer):.1e}",
    ]


if __name__ == "__main__":
    sys.exit(main())
