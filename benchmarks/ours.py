"""Shardyard as a contestant: the whole of ``shardyard.train.run``, observed step by step (see turns.py).

    python benchmarks/ours.py [--watch-last] FILE [overrides]

With ``--watch-last`` the last step is not one to be timed: every operation's tensors are followed through it,
and the most bytes that were alive at once are reported, weights and optimizer included.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from shardyard.allocator import tune_for_tensors

tune_for_tensors()  # as a rank of a run does, before torch is imported

import torch  # noqa: E402
from support.live_memory import LivePeak  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from turns import Turns  # noqa: E402

from shardyard.config import load_config  # noqa: E402
from shardyard.errors import UserError  # noqa: E402
from shardyard.monitor import StepRecord  # noqa: E402
from shardyard.train import run  # noqa: E402


class LiveFromHere(LivePeak):
    """Also counts what was alive before the block."""

    def __enter__(self):
        tensors = (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))
        for tensor in tensors:
            # One made of others (a DTensor, a low-bit state) holds nothing itself; its parts come by too.
            if not hasattr(type(tensor), "__tensor_flatten__") and tensor.device.type != "meta":
                reference = StorageWeakRef(tensor.untyped_storage())
                self._alive[reference.cdata] = reference
        self.peak = self.now()
        return super().__enter__()


class Watcher:
    """Reports each step; follows the memory of the last one if it is asked to."""

    def __init__(self, turns: Turns, *, watch_last: bool) -> None:
        self.turns, self.watch_last = turns, watch_last
        self.live: LiveFromHere | None = None

    def __call__(self, record: StepRecord | None) -> None:
        if record is None:
            self.turns.ready()
            return
        peak = None
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.live, peak = None, self.live.peak
        self.turns.report(record.tokens, record.loss, peak)
        if self.watch_last and record.step == record.total_steps - 1:
            self.live = LiveFromHere()
            self.live.__enter__()


def main(words: list[str]) -> int:
    watch_last = words[:1] == ["--watch-last"]
    loaded = load_config(words[1:] if watch_last else words)
    if os.environ.get("RANK", "0") != "0":
        return run(loaded)
    turns = Turns()
    try:
        return run(loaded, observe=Watcher(turns, watch_last=watch_last))
    except UserError as error:
        turns.refuse(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
