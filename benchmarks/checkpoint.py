"""What checkpoints, exports and conversions cost, beside ``cp`` of the same bytes on the same disk.

    python benchmarks/checkpoint.py [--layers 8] [--folder DIR]

A Qwen3 of about 140 million parameters (8 layers) on two CPU ranks with gloo, fp32 with AdamW's moments. Each
way is run three times, in turns with ``cp`` (a copy and an fsync of the bytes that the way writes or reads),
and the medians are printed: GB/s, the ratio to ``cp``, and for saves how long a step is held up. Pages of the
disk are warm in all of them. The last tables tell what part of the weight files' pages each rank touches at
start and how much memory an export takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.pages import touched_at_start, write_large_model
from support.ranks import RankPool
from support.training import Recipe, build_step

RANKS, ROUNDS = 2, 3
LIMIT_S = 1800.0


def main() -> int:
    options = _options()
    pool = RankPool()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as root:
        folder = write_large_model(Path(root) / "model", layers=options.layers)
        print(f"model: {_mib(folder):,.0f} MiB of bf16 files; {RANKS} ranks\n")
        times = pool.run(RANKS, time_store, folder, Path(root) / "run", timeout_s=LIMIT_S)[0]
        _print_ways(times)
        for way in (_conversion_times(folder, Path(root)),):
            _print_ways(way, head=False)
        stalls = times["save, beside the training"]["stall"] / times["save, waiting"]["seconds"]
        print(f"\na step is held up by a save beside the training {stalls:.3f} of one that waits")
        print("\n| at start | ranks | pages touched / share of the rank |\n|---|---|---|", flush=True)
        for name, world, parallel in (
            ("FSDP 2", 2, {}),
            ("FSDP 4", 4, {}),
            ("PP 2", 2, {"pp_size": 2}),
            ("TP 2", 2, {"tp_size": 2}),
        ):
            found = pool.run(world, touched_at_start, folder, Recipe(parallel=parallel), timeout_s=LIMIT_S)
            print(f"| {name} | {world} | {', '.join(f'{one.ratio:.2f}' for one in found)} |", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: the system's)")
    return parser.parse_args()


def time_store(folder: Path, run: Path) -> dict[str, dict[str, float]]:
    """On each rank: saves of both kinds, loads and exports, in turns with a copy by rank 0."""
    import torch.distributed as dist

    from shardyard.checkpoint import CheckpointStore, background_group, export_hf

    built, step, _ = build_step(folder, Recipe())
    model, optimizer = built.model, step.optimizer
    store = CheckpointStore(run, save_total_limit=1, background=background_group)
    rounds: dict[str, list[dict[str, float]]] = {}

    def note(way: str, path: Path, work: Callable[[], float | None]) -> None:
        dist.barrier()
        started = time.perf_counter()
        stall = work()
        dist.barrier()
        facts = {"seconds": time.perf_counter() - started, "bytes": _mib(path) * 2**20}
        facts |= {"stall": stall} if stall is not None else {}
        facts["cp"] = _copy_seconds(path, run) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        rounds.setdefault(way, []).append(facts)

    def save(number: int, wait: bool) -> float | None:
        started = time.perf_counter()
        store.save(number, model=model, optimizer=optimizer, run_state={}, wait=wait)
        held = time.perf_counter() - started
        store.wait()
        return None if wait else held

    for number in range(0, 2 * (ROUNDS + 1), 2):
        path = store.folder / f"global_step_{number + 1}"
        note("save, waiting", path, lambda n=number: save(n + 1, True))
        beside = store.folder / f"global_step_{number + 2}"
        note("save, beside the training", beside, lambda n=number: save(n + 2, False))
        note("load", beside, lambda p=beside: _without_result(store.load, p, model, optimizer))
        out = run / "export"
        note("export", out, lambda o=out: _without_result(export_hf, model, o, folder))
        shutil.rmtree(out, ignore_errors=True) if dist.get_rank() == 0 else None
    return {way: _medians(found[1:]) for way, found in rounds.items()}  # the first warms up


def _without_result(work: Callable[..., Any], *words: Any) -> None:
    if work.__name__ == "load":
        work(words[0], model=words[1], optimizer=words[2])
    else:
        work(words[0], out_dir=words[1], source_dir=words[2], tokenizer=None, probe_bytes=0)


def _conversion_times(folder: Path, root: Path) -> dict[str, dict[str, float]]:
    from shardyard.convert.job import Conversion, convert
    from shardyard.convert.mcore import McoreLayout

    ways: dict[str, Callable[[Path], Conversion]] = {
        "convert, HF to Megatron-core TP 2": lambda out: Conversion(
            folder, out, "mcore", layout=McoreLayout(tp=2)
        ),
        "convert, HF to DCP": lambda out: Conversion(folder, out, "dcp"),
        "convert, HF to HF in fp32": lambda out: Conversion(folder, out, "hf", dtype=_float32()),
    }
    found = {}
    for way, job in ways.items():
        rounds = []
        for number in range(ROUNDS + 1):
            out = root / f"converted-{len(found)}-{number}"
            started = time.perf_counter()
            convert(job(out))
            seconds = time.perf_counter() - started
            size = _mib(out) * 2**20
            rounds.append({"seconds": seconds, "bytes": size, "cp": _copy_seconds(out, root)})
            shutil.rmtree(out)
        found[way] = _medians(rounds[1:])
    return found


def _float32() -> Any:
    import torch

    return torch.float32


def _copy_seconds(path: Path, beside: Path) -> float:
    """A copy of all files below ``path``, made durable."""
    target = beside / f".copy-{os.getpid()}"
    started = time.perf_counter()
    shutil.copytree(path, target)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(one[key] for one in rounds) for key in rounds[0]}


def _mib(path: Path) -> float:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 2**20


def _print_ways(ways: dict[str, dict[str, float]], *, head: bool = True) -> None:
    if head:
        print("| way | MiB | s | GB/s | cp: s | speed beside cp | a step is held up, s |")
        print("|---|---|---|---|---|---|---|")
    for way, facts in ways.items():
        seconds, size = facts["seconds"], facts["bytes"]
        stall = f"{facts['stall']:.2f}" if "stall" in facts else f"{seconds:.2f}" if "save" in way else ""
        print(
            f"| {way} | {size / 2**20:,.0f} | {seconds:.2f} | {size / seconds / 1e9:.2f} | "
            f"{facts['cp']:.2f} | {facts['cp'] / seconds:.2f} x | {stall} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
