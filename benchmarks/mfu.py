"""How much of the processor's matrix-multiply peak a training step reaches, and where its time goes.

    python benchmarks/mfu.py --case pretrain --model SMOLLM2 --data FOLDER [overrides]
    python benchmarks/mfu.py [FILE.yaml] [overrides]

Operations are counted in closed form (shardyard/models/flops.py): each token's products with its weights, the
head at labelled positions, attention over the pairs that a document's tokens may see; nothing for padding,
recomputation or masked pairs. They are set against the best of several matrix products, measured in the same
process with the same threads and dtype, before and after the steps (the larger counts). One more step
runs under torch's profiler, and its time is summed by kind of operator.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from cases import add_case_options, words_of
from torch.profiler import ProfilerActivity, profile
from turns import installed_versions, machine, print_table

from shardyard.config import Config, load_config
from shardyard.data.types import MicroBatch
from shardyard.models.flops import ModelFlops, model_flops
from shardyard.monitor import StepRecord
from shardyard.train import run
from shardyard.train.step import StepResult, TrainStep

PEAK_SHAPES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (512, 576, 1536), (512, 576, 49152))
"""Rows, inner, columns of the products that look for the peak: squares, and a small model's mlp and head."""
GROUPS = (
    ("optimizer", ("adam", "lion", "muon", "_foreach", "optimizer")),
    ("attention", ("scaled_dot_product", "flash_attention", "attention", "_softmax")),
    ("matrix products", ("::mm", "::addmm", "::bmm", "::matmul", "::linear", "grouped_mm")),
    ("norms, the gradient's too", ("norm", "rsqrt", "::mean", "::pow")),
    ("loss", ("cross_entropy", "nll", "logsumexp", "log_softmax")),
    ("element-wise and copies", ("::mul", "::add", "::sub", "::div", "::neg", "::silu", "::sigmoid", "copy_",
                                 "::cat", "::clone", "::fill_", "::zero_", "::index", "::to", "::_to_copy")),
)  # fmt: skip
"""Kind -> parts of the names of operators; the first that fits."""


@dataclass
class Measured:
    """What the observed run tells."""

    config: Config
    profiled_step: int
    flops: ModelFlops | None = None
    seconds: list[float] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    started: float = 0.0
    profiler: Any = None
    table: dict[str, float] = field(default_factory=dict)


def peak_flops(
    dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]], seconds: float
) -> tuple[float, str]:
    """(operations a second, shape) of the fastest product; each shape is repeated for ``seconds``."""
    best = (0.0, "")
    for rows, inner, columns in shapes:
        a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
        torch.mm(a, b.T)
        times = []
        end = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b.T)
            times.append(time.perf_counter() - start)
        best = max(best, (2 * rows * inner * columns / min(times), f"{rows} x {inner} x {columns}"))
    return best


class Observing:
    """Wraps the step of the run: counts its operations, times it, profiles the last one."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self._call = TrainStep.__call__

    def __enter__(self) -> None:
        measured, call = self.measured, self._call

        def observed(this: TrainStep, batches: Sequence[MicroBatch], **keywords: Any) -> StepResult:
            if measured.flops is None:
                measured.flops = model_flops(this.model)
            measured.operations.append(_operations(measured.flops, batches))
            if keywords["step"] != measured.profiled_step:
                return call(this, batches, **keywords)
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                result = call(this, batches, **keywords)
            measured.table = by_kind(profiler.key_averages())
            return result

        TrainStep.__call__ = observed  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *exception: object) -> None:
        TrainStep.__call__ = self._call

    def observe(self, record: StepRecord | None) -> None:
        if record is not None:
            self.measured.seconds.append(time.perf_counter() - self.measured.started)
        self.measured.started = time.perf_counter()


def _operations(flops: ModelFlops | None, batches: Iterable[MicroBatch]) -> int:
    if flops is None:
        sys.exit("no closed form of this architecture's operations (shardyard/models/flops.py)")
    return sum(flops.training(batch.doc_lens, batch.num_labelled) for batch in batches)


def by_kind(events: Iterable[Any]) -> dict[str, float]:
    """Kind of operator -> seconds of the operators themselves, without those they call."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        name = event.key.lower()
        kind = next((kind for kind, parts in GROUPS if any(part in name for part in parts)), "other")
        seconds[kind] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps, one before them apart")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peak-seconds", type=float, default=2.0, help="of each product, before and after")
    parser.add_argument("--tiny", action="store_true", help="small products, to try the script")
    add_case_options(parser)
    options, rest = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    shapes = PEAK_SHAPES[:1] if options.tiny else PEAK_SHAPES
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(parser, options, rest, steps=options.steps + 2, folder=folder)
        loaded = load_config(words)
        dtype = torch.bfloat16 if loaded.config.parallel.param_dtype == "bf16" else torch.float32
        measured = Measured(loaded.config, profiled_step=options.steps + 2)
        before = peak_flops(dtype, shapes, options.peak_seconds)
        observing = Observing(measured)
        with observing:
            code = run(loaded, observe=observing.observe)
        peak = max(before, peak_flops(dtype, shapes, options.peak_seconds))
    report(measured, peak, options)
    return code


def report(measured: Measured, peak: tuple[float, str], options: argparse.Namespace) -> None:
    timed = slice(1, 1 + options.steps)
    rates = [
        count / seconds
        for count, seconds in zip(measured.operations[timed], measured.seconds[timed], strict=True)
    ]
    versions = ", ".join(f"{name} {of}" for name, of in installed_versions().items())
    print(f"\n{machine()}, {options.threads} threads; {versions}")
    rows = [
        ["operations a step", f"{median(measured.operations[timed]) / 1e9:.1f} GFLOP"],
        ["median step", f"{median(measured.seconds[timed]):.3f} s"],
        ["achieved", f"{median(rates) / 1e9:.1f} GFLOP/s"],
        ["matrix products' peak", f"{peak[0] / 1e9:.1f} GFLOP/s ({peak[1]})"],
        ["achieved / peak", f"{median(rates) / peak[0]:.4f}"],
    ]
    print_table(["", ""], rows)
    total = sum(measured.table.values())
    print("\nwhere the profiled step's time goes:")
    ordered = sorted(measured.table.items(), key=lambda row: -row[1])
    print_table(["operators", "s", "share"], [[kind, f"{s:.3f}", f"{s / total:.0%}"] for kind, s in ordered])


if __name__ == "__main__":
    sys.exit(main())
