"""One lever at a time: what it gives in speed and memory, and that it leaves the loss alone.

    python benchmarks/ablation.py --case alpaca --model SMOLLM2 --data FOLDER [overrides]
    python benchmarks/ablation.py --only recompute-full,compile-block [FILE.yaml] [overrides]
    python benchmarks/ablation.py --list

A row trains the same run with the lever and without it, each in a process of its own, taking turns step by
step (turns.py). ``speed`` is tokens per second with it over those without it, ``live`` the same of the most
bytes of living tensors (weights and optimizer included, followed through one step more that is not timed),
``resident`` of the peak resident memory. The last columns are the largest difference of a step's loss and
what is allowed. A lever that this machine or version cannot pull is a row with the reason.

A new lever is one line of LEVERS.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from cases import add_case_options, words_of
from throughput import ours
from turns import MIB, Refused, Result, compete, largest_loss_difference, machine, print_table

from shardyard.config import load_config
from shardyard.errors import UserError

ROUNDING = 1e-5
"""Of a step's loss, where only the order of fp32 sums differs."""


@dataclass(frozen=True)
class Lever:
    """Words that pull it and words that do not; ``tolerance`` None: the loss is another one; ``watched``:
    whether its living tensors can be followed.
    """

    name: str
    pulled: str
    left: str
    tolerance: float | None = ROUNDING
    ranks: int = 1
    watched: bool = True


def _one(name: str, key: str, pulled: str = "true", left: str = "false", **rest: Any) -> Lever:
    """A lever that is one setting."""
    return Lever(name, f"{key}={pulled}", f"{key}={left}", **rest)


LEVERS = (
    _one("fused-rmsnorm", "optimization.use_fused_rmsnorm"),
    _one("fused-rotary", "optimization.use_fused_rotary_pos_emb"),
    _one("fused-swiglu", "optimization.use_fused_swiglu"),
    _one("fused-attention", "optimization.use_flash_attn"),
    _one("grouped-experts", "optimization.moe_grouped_gemm"),
    Lever(
        "rows-end-to-end",
        pulled="training.per_device_train_batch_size=4 training.gradient_accumulation_steps=1",
        left="training.per_device_train_batch_size=1 training.gradient_accumulation_steps=4",
    ),
    _one("labelled-head-only", "data.train_on_prompt", "false", "true", tolerance=None),
    _one("chunked-loss", "optimization.chunk_loss_size", "256", "null"),
    _one("token-budget", "training.max_tokens_per_micro_batch", "1024", "null"),
    _one("recompute-full", "parallel.recompute", "full"),
    _one("recompute-selective", "parallel.recompute", "selective"),
    _one("activation-offload", "parallel.activation_offload"),
    _one("cpu-offload", "parallel.cpu_offload"),
    _one("keep-gathered", "parallel.reshard_after_forward", "false", "true", ranks=2),
    _one("optimizer-bf16", "training.optimizer_state_dtype", "bf16", "fp32", tolerance=2e-2),
    _one("optimizer-int8", "training.optimizer_state_dtype", "int8", "fp32", tolerance=2e-2),
    _one("optimizer-int4", "training.optimizer_state_dtype", "int4", "fp32", tolerance=5e-2),
    Lever(
        "step-in-backward",
        pulled="training.optimizer_in_backward=true training.max_grad_norm=0",
        left="training.optimizer_in_backward=false training.max_grad_norm=0",
    ),
    _one("step-in-backward-clipped", "training.optimizer_in_backward", "two_pass"),
    _one("compile-block", "optimization.compile", "block", "none", tolerance=1e-4, watched=False),
    _one("compile-model", "optimization.compile", "model", "none", tolerance=1e-4, watched=False),
    _one("bf16", "parallel.param_dtype", "bf16", "fp32", tolerance=5e-2),
    _one("fp16", "parallel.param_dtype", "fp16", "fp32", tolerance=5e-2),
    _one("muon", "training.optimizer", "muon", "adamw", tolerance=None),
    _one("lion", "training.optimizer", "lion", "adamw", tolerance=None),
    _one("adam-mini", "training.optimizer", "adam_mini", "adamw", tolerance=None),
    _one("group-by-length", "training.group_by_length", ranks=2),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options, rest = _options(parser)
    if options.list:
        for lever in LEVERS:
            print(f"{lever.name:<26}{lever.pulled or '(default)'}   against   {lever.left}")
        return 0
    levers = [lever for lever in LEVERS if not options.only or lever.name in options.only]
    if unknown := set(options.only) - {lever.name for lever in levers}:
        parser.error(f"no lever {', '.join(sorted(unknown))}; --list shows them")
    print(f"{machine()}, {options.threads} threads; {options.steps} timed steps after {options.warm_up}\n")
    rows, unequal = [], []
    for lever in levers:
        row, equal = measure(parser, options, rest, lever)
        rows.append(row)
        unequal += [] if equal else [lever.name]
        print(" ".join(row), file=sys.stderr, flush=True)
    print_table(["lever", "speed", "live", "resident", "live MiB", "loss apart", "allowed"], rows)
    if unequal:
        print(f"the loss is another one with {', '.join(unequal)}", file=sys.stderr)
    return 1 if unequal else 0


def _options(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="levers, by commas")
    parser.add_argument("--list", action="store_true", help="print the levers and their settings")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of each run; ranks share them")
    add_case_options(parser)
    return parser.parse_known_args()


def measure(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str], lever: Lever
) -> tuple[list[str], bool]:
    """A row of the table, and whether the losses are as equal as they must be."""
    steps = options.warm_up + options.steps + lever.watched  # the last one is watched
    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for side, own in (("with", lever.pulled), ("without", lever.left)):
            words = words_of(parser, options, [*rest, *own.split()], steps=steps, folder=f"{folder}/{side}")
            try:
                load_config(words)
            except UserError as error:
                return _refused(lever, str(error)), True
            threads = max(1, options.threads // lever.ranks)
            name = f"{lever.name}, {side}"
            entries.append(ours(words, threads, name, ranks=lever.ranks, watch_last=lever.watched))
        try:
            pulled, left = compete(entries, steps=steps, warm_up=options.warm_up)
        except Refused as refusal:  # found when the run was built
            return _refused(lever, str(refusal)), True
    return _row(lever, pulled, left)


def _row(lever: Lever, pulled: Result, left: Result) -> tuple[list[str], bool]:
    live, other = pulled.live_bytes, left.live_bytes
    apart = largest_loss_difference(pulled, left)
    row = [
        lever.name, f"{pulled.tokens_per_second / left.tokens_per_second:.2f} x",
        f"{live / other:.2f} x" if live and other else "",
        f"{pulled.peak_bytes / left.peak_bytes:.2f} x",
        f"{live / MIB:.0f} / {other / MIB:.0f}" if live and other else "",
        f"{apart:.1e}", "another" if lever.tolerance is None else f"{lever.tolerance:.0e}",
    ]  # fmt: skip
    return row, lever.tolerance is None or apart <= lever.tolerance


def _refused(lever: Lever, reason: str) -> list[str]:
    return [lever.name, f"not here: {' '.join(reason.split())[:160]}", "", "", "", "", ""]


if __name__ == "__main__":
    sys.exit(main())
