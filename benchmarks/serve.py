"""Tokens per second of `shardyard serve` and of transformers' own server, on the same model and prompts.

    python benchmarks/serve.py --model FOLDER [--streams 8] [--tokens 64] [--pairs 5]
    python benchmarks/serve.py --model FOLDER --smoke         # small, to see that all of it works

Both servers run on this machine in the same number of threads and the same dtype. They are asked in turns,
ours first in odd pairs, theirs in even ones; whoever is not asked is stopped meanwhile (SIGSTOP), as an idle
server may poll. In a turn each of the streams sends one chat, greedily, and reads it to its end. Tokens are
those of the texts that came, counted by the model's tokenizer; seconds are from the first request to the last
byte. What is printed: each turn, the median of the pairs' ratios, and in how many answers the two say the
same. transformers' server runs with --continuous-batching if it works here, else without, which is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from turns import machine, print_table

SUBJECTS = (
    "tides",
    "bread",
    "bridges",
    "maps",
    "rivers",
    "clocks",
    "glass",
    "bees",
    "rope",
    "paper",
    "salt",
    "kites",
)
START_S, TURN_S = 900.0, 3600.0


@dataclass(frozen=True)
class Server:
    """``model`` is the name that it knows its model by."""

    name: str
    command: Sequence[str]
    port: int
    model: str


@dataclass(frozen=True)
class Turn:
    """What a turn gave: the texts in the order of the streams."""

    texts: tuple[str, ...]
    seconds: float
    first_s: float
    """Median time to the first text."""


def main() -> int:
    options = _options()
    model = str(Path(options.model).resolve())
    threads = options.threads or len(os.sched_getaffinity(0))
    print(
        f"{machine()}; {threads} threads; {options.dtype}; "
        f"{options.streams} streams of {options.tokens} tokens"
    )
    print(
        ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "fastapi", "uvicorn")),
        flush=True,
    )
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ours = held.enter_context(_running(_ours(model, options), threads, folder))
        _ask(ours, options, 0)
        os.kill(ours.process.pid, signal.SIGSTOP)
        theirs = held.enter_context(_theirs(model, options, threads, folder))
        os.kill(theirs.process.pid, signal.SIGSTOP)
        pairs = [_pair(ours, theirs, options, number) for number in range(1, options.pairs + 1)]
    _report(pairs, model)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="a Hugging Face folder with a chat template")
    add("--streams", type=int, default=8, help="requests at the same time (default 8)")
    add("--tokens", type=int, default=64, help="most tokens of an answer (default 64)")
    add("--pairs", type=int, default=5)
    add("--threads", type=int, help="of each server (default: the cores)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--plain", action="store_true", help="their server without --continuous-batching")
    add("--smoke", action="store_true", help="2 streams of 8 tokens, one pair")
    options = parser.parse_args()
    if options.smoke:
        options.streams, options.tokens, options.pairs = 2, 8, 1
    return options


def _ours(model: str, options: argparse.Namespace) -> Server:
    port, dtype = _free_port(), {"float32": "fp32", "bfloat16": "bf16"}[options.dtype]
    words = [
        "serve",
        "--model",
        model,
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--served-model-name",
        "served",
    ]
    return Server("shardyard", [sys.executable, "-m", "shardyard", *words], port, "served")


class _Process:
    """A server that answers; its log goes into a file."""

    def __init__(self, server: Server, threads: int, folder: Path) -> None:
        self.server = server
        self.log = folder / f"{server.port}.log"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                server.command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Until it answers. RuntimeError: it has ended."""
        end = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.server.name} has ended: {self.tail()}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.server.name} does not answer after {START_S:g} s: {self.tail()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/health", timeout=5).read()
            except OSError:
                time.sleep(0.5)
            else:
                return

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def _running(server: Server, threads: int, folder: Path) -> Iterator[_Process]:
    found = _Process(server, threads, folder)
    try:
        found.wait()
        yield found
    finally:
        found.end()


@contextmanager
def _theirs(model: str, options: argparse.Namespace, threads: int, folder: Path) -> Iterator[_Process]:
    """transformers' server, in the faster way that works here, after a first answer."""
    for batching in ([] if options.plain else ["--continuous-batching"]), []:
        port = _free_port()
        command = [
            str(Path(sys.executable).with_name("transformers")), "serve", model, "--device", "cpu", "--port",
            str(port), "--dtype", options.dtype, *batching,
        ]  # fmt: skip
        found = _Process(Server("transformers serve", command, port, model), threads, folder)
        try:
            try:
                found.wait()
                _ask(found, options, 0)
            except Exception as error:
                if not batching:
                    raise
                print(f"their continuous batching does not work here: {error}"[:500], file=sys.stderr)
                continue
            print(f"transformers serve: continuous batching {'on' if batching else 'off'}", flush=True)
            yield found
            return
        finally:
            found.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ask(process: _Process, options: argparse.Namespace, round_: int) -> Turn:
    """One turn: all streams at once. Each round has prompts of its own, so that no cache of prompts helps."""
    from openai import OpenAI

    server = process.server
    client = OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=TURN_S, max_retries=0
    )

    def stream(number: int) -> tuple[str, float]:
        subject = SUBJECTS[(number + round_) % len(SUBJECTS)]
        prompt = f"Round {round_}. Tell me, in {3 + number} long paragraphs, about the history of {subject}."
        text, began, first = "", time.perf_counter(), 0.0
        for chunk in client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": prompt}], max_tokens=options.tokens,
            temperature=0, stream=True,
        ):  # fmt: skip
            new = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            first = first or (time.perf_counter() - began if new else 0.0)
            text += new
        return text, first

    with ThreadPoolExecutor(options.streams) as pool:
        began = time.perf_counter()
        found = list(pool.map(stream, range(options.streams)))
        seconds = time.perf_counter() - began
    if not all(text for text, _ in found):
        raise RuntimeError(f"{server.name} gave an empty answer: {process.tail()}")
    return Turn(tuple(text for text, _ in found), seconds, median(first for _, first in found))


def _pair(ours: _Process, theirs: _Process, options: argparse.Namespace, number: int) -> tuple[Turn, Turn]:
    turns: dict[str, Turn] = {}
    for process in (ours, theirs) if number % 2 else (theirs, ours):
        os.kill(process.process.pid, signal.SIGCONT)
        turns[process.server.name] = _ask(process, options, number)
        os.kill(process.process.pid, signal.SIGSTOP)
    return turns[ours.server.name], turns[theirs.server.name]


def _report(pairs: Sequence[tuple[Turn, Turn]], model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def speed(turn: Turn) -> float:
        return (
            sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in turn.texts)
            / turn.seconds
        )

    rows, ratios = [], []
    for number, (ours, theirs) in enumerate(pairs, 1):
        ratios.append(speed(ours) / speed(theirs))
        same = sum(one.strip() == other.strip() for one, other in zip(ours.texts, theirs.texts, strict=True))
        rows.append([
            str(number), f"{speed(ours):.2f}", f"{speed(theirs):.2f}", f"{ratios[-1]:.3f}",
            f"{ours.first_s:.2f}", f"{theirs.first_s:.2f}", f"{same}/{len(ours.texts)}",
        ])  # fmt: skip
    head = ["pair", "ours tok/s", "theirs tok/s", "ratio", "ours first s", "theirs first s", "same answers"]
    print_table(head, rows)
    print(f"median ratio {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    sys.exit(main())
