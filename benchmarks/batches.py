"""What cutting global batches by length does: equal work for all ranks, micro-batches, tokens per second.

    python benchmarks/batches.py --lengths alpaca_en_demo.json --tokenizer DIR      # how batches are cut
    python benchmarks/batches.py --race --case alpaca --model DIR --data FOLDER     # tokens/s of two ranks

The first cuts the global batches of one epoch of a file's rows, in the order of training, in each way, and
counts. A step is simulated: ranks meet after each micro-batch, which takes as long as the dearest of theirs
(costs are those of data/cut.py), so ``idle`` is the share of the ranks' time that is spent waiting. The
second trains: two ranks with one thread each take turns step by step (turns.py) with two ranks that cut the
same global batches otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import add_case_options, words_of
from throughput import ours
from turns import compete, largest_loss_difference, machine, print_table

from shardyard.data.cut import EVEN_AT_HIDDEN_SIZES, Cut
from shardyard.data.order import EpochOrder

LOSS_TOLERANCE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="a JSON list of rows, or of their lengths in tokens")
    parser.add_argument("--tokenizer", type=Path, help="counts the tokens of rows: a Hugging Face folder")
    parser.add_argument("--cutoff", type=int, default=2048, help="tokens of a row at most")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch where they are counted")
    parser.add_argument("--accumulation", type=int, default=4, help="such micro-batches of a rank in a step")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--race", action="store_true", help="train on two ranks instead")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch in the race")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    add_case_options(parser)
    options, rest = parser.parse_known_args()
    if options.race:
        return race(parser, options, rest)
    if options.lengths is None:
        parser.error("give --lengths, or --race")
    count(lengths_of(options.lengths, options.tokenizer, options.cutoff), options)
    return 0


def lengths_of(path: Path, tokenizer: Path | None, cutoff: int) -> np.ndarray:
    """Tokens of each row, int64: of all its text, a few more than a template would add."""
    rows: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(rows[0], int):
        return np.minimum(np.array(rows, np.int64), cutoff)
    if tokenizer is None:
        sys.exit("--tokenizer is needed to count the tokens of rows")
    from tokenizers import Tokenizer

    counter = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [" ".join(_texts(row)) for row in rows]
    return np.minimum([len(encoding.ids) for encoding in counter.encode_batch(texts)], cutoff).astype(
        np.int64
    )


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    return [text for one in value for text in _texts(one)] if isinstance(value, list) else [str(value)]


def count(lengths: np.ndarray, options: argparse.Namespace) -> None:
    """One table for each number of ranks."""
    shown = ", ".join(f"{share} % {np.percentile(lengths, share):.0f}" for share in (50, 90, 99, 100))
    print(f"{len(lengths)} rows, {lengths.mean():.0f} tokens in the mean; {shown}")
    print(f"hidden size {options.hidden_size}")
    even_at = EVEN_AT_HIDDEN_SIZES * options.hidden_size
    for ranks in options.ranks:
        cuts = {f"{options.rows} rows": None, "by length": Cut(options.rows, by_length=True, even_at=even_at)}
        for budget in options.budgets:
            cuts[f"{budget} tokens"] = Cut(options.rows, max_tokens=budget, even_at=even_at)
        size = options.rows * options.accumulation * ranks
        print(f"\n{ranks} ranks, global batches of {size} rows")
        rows = [
            [name, *_figures(lengths, cut, ranks, size, options.rows, even_at)] for name, cut in cuts.items()
        ]
        header = ["cut", "micro-batches", "fillers", "longest (tokens)", "rank max/mean", "idle"]
        print_table(header, rows)


def _figures(
    lengths: np.ndarray, cut: Cut | None, ranks: int, size: int, rows: int, even_at: int
) -> list[str]:
    order = EpochOrder(len(lengths), seed=42, shuffle=True)
    batches = [
        order.units(0, begin, min(begin + size, len(lengths))).indices
        for begin in range(0, len(lengths), size)
    ]
    batches = [batch for batch in batches if len(batch) == size] or batches
    steps = [_plan(lengths[batch], cut, ranks, rows) for batch in batches]
    costs = [[[sum(n * (even_at + n) for n in part) for part in share] for share in step] for step in steps]
    parts = [part for step in steps for share in step for part in share]
    unevenness = np.mean([max(map(sum, step)) / np.mean(list(map(sum, step))) for step in costs])
    busy = sum(sum(share) for step in costs for share in step)
    elapsed = sum(max(together) for step in costs for together in zip(*step, strict=True)) * ranks
    return [
        f"{np.mean([len(step[0]) for step in steps]):.1f}",
        f"{sum(not part for part in parts) / len(parts):.1%}",
        str(max(map(sum, parts))), f"{unevenness:.3f}", f"{1 - busy / elapsed:.1%}",
    ]  # fmt: skip


def _plan(lengths: np.ndarray, cut: Cut | None, ranks: int, rows: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> lengths of its rows."""
    sizes = lengths.tolist()
    if cut is None:
        shares: list[Sequence[int]] = [sizes[rank::ranks] for rank in range(ranks)]
        most = max(map(len, shares))
        return [[list(share[begin : begin + rows]) for begin in range(0, most, rows)] for share in shares]
    plan = cut.micro_batches([[n] for n in sizes], ranks)
    return [[[sizes[unit] for unit in part] for part in share] for share in plan]


def race(parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]) -> int:
    """Two ranks, the same global batches of 16 rows, in each way of cutting them."""
    ways = {
        "in order": ["training.group_by_length=false"],
        "by length": [],
        "by tokens": [f"training.max_tokens_per_micro_batch={options.budget}"],
    }
    rest = [*rest, "training.gradient_accumulation_steps=2"]
    steps = options.warm_up + options.steps
    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for number, (name, own) in enumerate(ways.items()):
            words = words_of(
                parser, options, [*rest, *own], steps=steps, folder=os.path.join(folder, str(number))
            )
            entries.append(ours(words, 1, name, ranks=2))
        results = compete(entries, steps=steps, warm_up=options.warm_up)
    first, worst = results[0], max(largest_loss_difference(results[0], other) for other in results[1:])
    print(f"\n{machine()}, 2 ranks with one thread each; {options.steps} timed steps after {options.warm_up}")
    rows = [
        [
            result.name, f"{result.tokens_per_second_over_all:.1f}", f"{result.tokens_per_second:.1f}",
            f"{result.tokens_per_second_over_all / first.tokens_per_second_over_all:.2f} x",
            f"{largest_loss_difference(first, result):.1e}",
        ]
        for result in results
    ]  # fmt: skip
    print_table(["cut", "tokens/s (all steps)", "tokens/s (median step)", "against rows", "loss apart"], rows)
    return int(worst > LOSS_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
