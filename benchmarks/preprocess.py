"""Tokens per second and peak memory of ``shardyard preprocess``, beside one process that calls the fast
tokenizer once per row.

    python benchmarks/preprocess.py --tokenizer DIR [--source FILE ...] [--mb 20 200] [--workers 2]

Both read the same files, add the same end-of-document token and write the same ids, which are compared. The
input is made by repeating the rows of the sources (jsonl with a column ``text``, or txt) with variations;
without sources it is made of invented words. Half of it is one jsonl file, half one txt file.

Each contestant is a process of its own that loads the tokenizer, waits, and then works alone. Reported are
the wall clock and, since other work on the machine slows it, the seconds of the processor. Memory is the sum
of the proportional set sizes (PSS: a page that n processes share counts 1/n in each) of the anonymous memory
of the process and its children, read every tenth of a second, less what it was when the tokenizer was loaded;
pages of files (libraries, input) are the system's to take back and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

MB = 10**6
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One contestant's run."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int

    def row(self, name: str) -> str:
        return (
            f"{name:<34} {self.tokens:>11,} {self.tokens / self.wall_seconds:>12,.0f} "
            f"{self.tokens / self.cpu_seconds:>16,.0f} {self.peak_bytes / MIB:>10,.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Preprocessing beside a plain loop over the fast tokenizer.")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--source", nargs="*", default=[], type=Path)
    parser.add_argument("--mb", nargs="+", default=[20, 200], type=int, help="megabytes of input")
    parser.add_argument("--workers", default=2, type=int)
    parser.add_argument("--child", choices=["loop", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--files", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options)
        return
    names = ("tokenizers", "transformers", "numpy")
    print(
        f"python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}; "
        f"{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.mb:
            _compare(options, megabytes, Path(folder))


def _compare(options: argparse.Namespace, megabytes: int, folder: Path) -> None:
    files = make_input(options.source, megabytes * MB, folder)
    size = sum(file.stat().st_size for file in files)
    loop = _run("loop", options, files, folder)
    ours = _run("ours", options, files, folder)
    same = (folder / "loop.bin").read_bytes() == (folder / "ours.bin").read_bytes()
    header = f"{size / MB:.0f} MB"
    print(f"\n{header:<34} {'tokens':>11} {'tokens/s':>12} {'tokens/cpu-s':>16} {'peak MiB':>10}")
    print(loop.row("one process, one call per row"))
    print(ours.row(f"shardyard preprocess, {options.workers} workers"))
    wall = loop.wall_seconds / ours.wall_seconds
    cpu = loop.cpu_seconds / ours.cpu_seconds
    print(
        f"ratio {wall:.2f} by the clock, {cpu:.2f} by cpu seconds; ids are {'the same' if same else 'OTHERS'}"
    )
    if not same:
        sys.exit("the two wrote different ids")


def _run(child: str, options: argparse.Namespace, files: Sequence[Path], folder: Path) -> Measured:
    """Start a contestant, wait until it has its tokenizer, and watch it work."""
    command = [
        sys.executable, __file__, "--tokenizer", options.tokenizer, "--workers", str(options.workers),
        "--child", child, "--files", *map(str, files), "--out", str(folder / child),
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            sys.exit(f"{child} did not start; its message stands above")
        before = _tree_pss(process.pid)
        watch = _Watch(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        line = process.stdout.readline()
        peak = watch.stop()
    if not line:
        sys.exit(f"{child} failed; its message stands above")
    return Measured(**json.loads(line), peak_bytes=max(peak - before, 0))


class _Watch:
    """Samples the memory of a process and its children until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while not self._stopped.wait(0.1):
            self._peak = max(self._peak, _tree_pss(self._pid))


def _tree_pss(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        pids = [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_pss, pids))


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (OSError, ProcessLookupError):  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def _child(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer("warm up")
    print("ready", flush=True)
    sys.stdin.readline()
    work = _loop if options.child == "loop" else _ours
    cpu, began = _cpu_seconds(), time.perf_counter()
    tokens = work(tokenizer, options)
    wall = time.perf_counter() - began
    told = {"tokens": tokens, "wall_seconds": wall, "cpu_seconds": _cpu_seconds() - cpu}
    print(json.dumps(told), flush=True)


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _loop(tokenizer: Any, options: argparse.Namespace) -> int:
    """What a script does that tokenises row by row."""
    tokens = 0
    with options.out.with_suffix(".bin").open("wb") as out:
        for text in _texts(options.files):
            ids = tokenizer(text)["input_ids"]
            ids.append(tokenizer.eos_token_id)
            tokens += len(ids)
            out.write(np.array(ids, np.int32).tobytes())
    return tokens


def _ours(tokenizer: Any, options: argparse.Namespace) -> int:
    from shardyard.data.preprocess import Job, run_job
    from shardyard.data.preprocess.run import Pace
    from shardyard.data.sources import resolve_datasets

    entries = resolve_datasets([str(file) for file in options.files], ".")
    prefix = options.out.with_name("job")
    job = Job("text", entries, prefix, append_eod=True, pace=Pace(options.workers), overwrite=True)
    result = run_job(job, tokenizer)
    result.prefixes[0].with_name(f"{result.prefixes[0].name}.bin").replace(options.out.with_suffix(".bin"))
    return result.counts["text"]["tokens"]


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"] if file.suffix == ".jsonl" else line.rstrip("\n")
                if text.strip():
                    yield text


def make_input(sources: Sequence[Path], size: int, folder: Path) -> list[Path]:
    """A jsonl and a txt file of ``size`` bytes together, the same ones for the same arguments."""
    rng = random.Random(size)
    rows = list(_texts(sources)) if sources else [_invented(rng) for _ in range(200)]
    files = [folder / "input.jsonl", folder / "input.txt"]
    for file in files:
        written = 0
        with file.open("w", encoding="utf-8") as out:
            while written < size / len(files):
                text = _varied(rng.choice(rows), rng)
                line = json.dumps({"text": text}, ensure_ascii=False) if file.suffix == ".jsonl" else text
                out.write(line + "\n")
                written += len(line.encode()) + 1
    return files


def _varied(text: str, rng: random.Random) -> str:
    """The same words with every tenth one changed place, and a number no other row has."""
    words = text.replace("\n", " ").split(" ")
    for place in range(0, len(words) - 1, 10):
        other = rng.randrange(len(words))
        words[place], words[other] = words[other], words[place]
    return " ".join([*words, str(rng.getrandbits(40))])


def _invented(rng: random.Random) -> str:
    syllables = [a + b for a in "bcdfglmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(2000)]
    return " ".join(words[min(int(rng.paretovariate(0.8)), 1999)] for _ in range(rng.randint(30, 3000)))


if __name__ == "__main__":
    main()
