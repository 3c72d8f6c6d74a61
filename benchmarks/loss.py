"""The output layer and its loss: ours whole and in chunks, torch's, and transformers' own.

    python benchmarks/loss.py                          # heads of SmolLM2-135M and Qwen3-0.6B
    python benchmarks/loss.py --head 1024x151936 --rows 700 --ways ours,torch --repeats 5
    python benchmarks/loss.py --tiny                   # seconds: that it runs

Forward and backward of L trained positions, random numbers, one process. A way's time is the least of its
repeats, which take turns; ``ratio`` is that of F.cross_entropy on whole logits over it, so more than 1 is
faster. ``peak`` is what is alive at once beyond hidden states and weight, the weight's gradient included,
counted from tensors in a run of its own. ``--cpu-time`` counts the seconds of the process instead of the
clock's, for a machine that does other things too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.live_memory import LivePeak

from shardyard.ops.linear_cross_entropy import HeadLoss, linear_cross_entropy_sum

HEADS = {"SmolLM2-135M": "576x49152", "Qwen3-0.6B": "1024x151936"}
TORCH = "torch"
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(chunks: list[int]) -> dict[str, Loss]:
    """Name -> (hidden [L, H], weight [V, H], targets [L]) -> the sum of the cross entropy."""
    found: dict[str, Loss] = {TORCH: _torch, "torch-linear": _torch_linear, "transformers": _transformers}
    found["ours"] = lambda hidden, weight, targets: linear_cross_entropy_sum(hidden, weight, targets)
    for chunk in chunks:
        found[f"ours-{chunk}"] = _ours(chunk)
    return found


def _torch(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def _torch_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum")


def _transformers(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    count = torch.tensor(1)  # with a count of 1 the loss is the sum
    return ForCausalLMLoss(
        F.linear(hidden, weight), targets, len(weight), num_items_in_batch=count, shift_labels=targets
    )


def _ours(chunk: int) -> Loss:
    return lambda hidden, weight, targets: linear_cross_entropy_sum(
        hidden, weight, targets, None, HeadLoss(chunk=chunk)
    )


def main() -> int:
    options = _options()
    heads = {options.head: options.head} if options.head else HEADS
    if options.tiny:
        heads, options.rows, options.repeats = {"tiny": "16x500"}, 24, 1
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {options.dtype}\n")
    for name, shape in heads.items():
        hidden_size, words = (int(size) for size in shape.split("x"))
        _print_head(name, hidden_size, words, options, clock)
    return 0


def _print_head(
    name: str, hidden_size: int, words: int, options: argparse.Namespace, clock: Callable[[], float]
) -> None:
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.rows, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(words, hidden_size, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, words, (options.rows,), generator=generator)
    known = ways(options.chunks)
    chosen = {way: known[way] for way in options.ways or known}
    seconds: dict[str, list[float]] = {way: [] for way in chosen}
    for _ in range(options.repeats + 1):  # the first one warms up
        for way, loss in chosen.items():
            started = clock()
            loss(hidden, weight, targets).backward()
            seconds[way].append(clock() - started)
            hidden.grad = weight.grad = None
    least = {way: min(found[1:]) for way, found in seconds.items()}
    base = least.get(TORCH, min(least.values()))
    print(f"{name}: {options.rows} positions, {hidden_size} x {words}\n")
    print("| way | seconds | ratio | peak MiB | loss | gradient norm |\n|---|---|---|---|---|---|")
    for way, loss in chosen.items():
        with LivePeak() as live:
            value = loss(hidden, weight, targets)
            value.backward()
        assert hidden.grad is not None and weight.grad is not None
        norm = (hidden.grad.float().square().sum() + weight.grad.float().square().sum()).sqrt()
        hidden.grad = weight.grad = None
        print(
            f"| {way} | {least[way]:.3f} | {base / least[way]:.2f} | {live.peak / 2**20:,.0f} "
            f"| {value.item():.6g} | {norm.item():.6g} |",
            flush=True,
        )
    print(flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", help="HIDDENxWORDS instead of the two models'")
    parser.add_argument("--rows", type=int, default=768, help="trained positions (768)")
    parser.add_argument(
        "--chunks", type=_integers, default=[64, 256, 1024], help="rows of a chunk (64,256,1024)"
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), help="some of the table's, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each way (3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the process, not of the clock")
    parser.add_argument("--tiny", action="store_true", help="a small head, once")
    return parser.parse_args()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
