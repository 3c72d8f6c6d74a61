"""Ranks against one process with as many threads; and what a step costs as sequences, layers and rows grow.

    python benchmarks/scaling.py                            # the quick start's model, invented text
    python benchmarks/scaling.py --model SMOLLM2 --axes ranks,length,layers,rows
    python benchmarks/scaling.py --axes ranks --ranks 2,4

Everything trains the same kind of run: packed windows of one stream of invented text. ``ranks`` sets N ranks
of one thread each, sharing each batch and the model (FSDP), beside one process with N threads and the whole
batch; the ratio is of tokens per second. On the other axes the points are processes that take turns
(turns.py), and the exponent is the slope of log(seconds a step) over log(size), between neighbours and over
all points: 1 is linear. Layers are drawn anew from the model's config, so its weights do not matter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cases import REPOSITORY
from throughput import ours
from turns import MIB, Entry, Result, compete, installed_versions, machine, print_table

QUICKSTART_MODEL = REPOSITORY / "examples" / "quickstart" / "assets" / "model"
YAML = REPOSITORY / "examples" / "data" / "pretrain.yaml"
AXES = ("ranks", "length", "layers", "rows")


def main() -> int:
    options = _options()
    print(f"{machine()}; " + ", ".join(f"{name} {of}" for name, of in installed_versions().items()))
    with tempfile.TemporaryDirectory() as folder:
        text = invented_text(Path(folder) / "text.jsonl", options)
        for axis in options.axes:
            print(f"\n{axis}:")
            if axis == "ranks":
                compare_ranks(options, text, folder)
            else:
                grow(options, text, folder, axis)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", type=lambda text: text.split(","), default=list(AXES), help=",".join(AXES))
    parser.add_argument("--model", type=Path, default=QUICKSTART_MODEL, help="a Hugging Face folder")
    parser.add_argument("--ranks", type=_numbers, default=[2], help="numbers of ranks, by commas")
    parser.add_argument("--length", type=_numbers, default=[128, 256, 512, 1024], help="tokens of a window")
    parser.add_argument("--layers", type=_numbers, default=[2, 4, 8])
    parser.add_argument("--rows", type=_numbers, default=[2, 4, 8], help="windows of a micro-batch")
    parser.add_argument("--base", type=_numbers, default=[256, 4, 4], help="length,layers,rows that stay")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if unknown := set(options.axes) - set(AXES):
        parser.error(f"no axis {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def invented_text(path: Path, options: argparse.Namespace) -> Path:
    """Documents of random words, enough for every step of the largest point at one token a word."""
    generator = random.Random(0)
    length, _, rows = options.base
    windows = max(rows, *options.rows) * (options.steps + options.warm_up)
    words_left = max(length, *options.length) * windows + 1000
    with path.open("w", encoding="utf-8") as file:
        while words_left > 0:
            count = generator.randint(100, 400)
            words = (
                "".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7)))
                for _ in range(count)
            )
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
            words_left -= count
    return path


def words_of(
    options: argparse.Namespace, text: Path, folder: str, *, length: int, layers: int, rows: int
) -> list[str]:
    """A run of ``rows`` windows of ``length`` tokens a micro-batch, with ``layers`` layers."""
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    overrides: dict[str, object] = {"num_hidden_layers": layers}
    if "layer_types" in config:
        overrides["layer_types"] = (config["layer_types"] * layers)[:layers]
    return [
        str(YAML), f"model.model_name_or_path={options.model}",
        f"model.config_overrides={json.dumps(overrides)}",
        f"model.cache_dir={folder}/cache", f"data.dataset={json.dumps({'file_name': str(text)})}",
        f"data.cutoff_len={length}", "data.reset_attention_mask=false", "data.split=100,0,0",
        f"training.per_device_train_batch_size={rows}",
        f"training.max_steps={options.warm_up + options.steps}",
        "training.lr_scheduler_type=constant", "training.warmup_ratio=0", "training.save_steps=0",
        "training.save_epochs=0", "training.save_hf_weights=false", "parallel.param_dtype=fp32",
    ]  # fmt: skip


def run_points(options: argparse.Namespace, entries: Sequence[Entry]) -> list[Result]:
    return compete(entries, steps=options.warm_up + options.steps, warm_up=options.warm_up)


def compare_ranks(options: argparse.Namespace, text: Path, folder: str) -> None:
    """One process with N threads beside N ranks of one thread; the batch is the same."""
    length, layers, rows = options.base
    table = []
    for ranks in options.ranks:
        if rows % ranks:
            sys.exit(f"--base: {rows} rows do not divide over {ranks} ranks")
        entries = []
        for name, count, threads in (
            (f"1 process, {ranks} threads", 1, ranks),
            (f"{ranks} ranks, 1 thread", ranks, 1),
        ):
            words = words_of(options, text, folder, length=length, layers=layers, rows=rows // count)
            entries.append(
                ours(
                    [*words, f"training.output_dir={folder}/ranks{ranks}-{count}"], threads, name, ranks=count
                )
            )
        alone, shared = run_points(options, entries)
        ratio = shared.tokens_per_second / alone.tokens_per_second
        apart = max(abs(a.loss - b.loss) for a, b in zip(alone.steps, shared.steps, strict=True))
        for result, last in ((alone, ["", ""]), (shared, [f"{ratio:.2f} x", f"{apart:.1e}"])):
            table.append(
                [result.name, f"{result.tokens_per_second:.1f}", f"{result.peak_bytes / MIB:.0f}", *last]
            )
        if apart > 1e-4:
            sys.exit(f"the losses of {shared.name} are others: they differ by {apart:.1e}")
    print_table(["", "tokens/s", "peak MiB (rank 0)", "ratio", "loss apart"], table)


def grow(options: argparse.Namespace, text: Path, folder: str, axis: str) -> None:
    """One size grows, the others stay."""
    base = dict(zip(("length", "layers", "rows"), options.base, strict=True))
    sizes = sorted(getattr(options, axis))
    entries = []
    for size in sizes:
        words = words_of(options, text, folder, **(base | {axis: size}))
        words.append(f"training.output_dir={folder}/{axis}{size}")
        entries.append(ours(words, options.threads, str(size)))
    results = run_points(options, entries)
    seconds = [_median_seconds(result) for result in results]
    rows = []
    for place, (size, result) in enumerate(zip(sizes, results, strict=True)):
        near = exponent(sizes[place - 1 : place + 1], seconds[place - 1 : place + 1]) if place else None
        rows.append(
            [
                str(size), f"{seconds[place]:.3f}", f"{result.tokens_per_second:.0f}",
                f"{result.peak_bytes / MIB:.0f}", "" if near is None else f"{near:.2f}",
            ]
        )  # fmt: skip
    print_table([axis, "s/step", "tokens/s", "peak MiB", "exponent"], rows)
    if len(sizes) > 1:
        print(f"over all points: seconds grow as {axis} ** {exponent(sizes, seconds):.2f}")


def _median_seconds(result: Result) -> float:
    ordered = sorted(step.seconds for step in result.timed)
    return ordered[len(ordered) // 2]


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of the least-squares line through (log size, log seconds)."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


if __name__ == "__main__":
    sys.exit(main())
