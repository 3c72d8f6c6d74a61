"""Batches through the processes, their outcomes in order to where they are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardyard.data.preprocess.batches import Batch, Input, Position, Read
from shardyard.data.preprocess.outcome import Outcome, Tally
from shardyard.data.preprocess.spool import Spool
from shardyard.data.progress import InputProgress
from shardyard.data.workers import ordered_map


class Sink(Protocol):
    """Where outcomes end."""

    def add(self, arrays: dict[str, np.ndarray], /) -> None: ...


@dataclass(frozen=True)
class Pace:
    """How the work is done; none of it changes a byte of the result."""

    workers: int = 1
    log_every_documents: int | None = None
    """Documents between two lines of progress; None: one every few seconds."""


def run_batches(
    source: Input, work: Callable[[Batch], Outcome], sink: Sink, pace: Pace, spool: Spool | None = None
) -> Tally:
    """Send every batch of ``source`` through ``work`` and give the outcomes, in order, to ``sink``.

    With a ``spool`` the outcomes are kept there first, so that a killed run can go on.

    Raises:
        UserError: what ``source``, ``work`` or ``sink`` raise, or a process died.
    """
    tally = Tally()
    ends: deque[Read] = deque()

    def batches(start: Position) -> Iterator[Batch]:
        for read in source.read(start):
            ends.append(read._replace(batch=Batch(read.batch.entry, [])))
            yield read.batch

    start, done = (spool.position, spool.input_bytes) if spool else (Position(), 0)
    with InputProgress(source.total_bytes, done=done, every_documents=pace.log_every_documents) as progress:
        results = ordered_map(work, batches(start), workers=pace.workers, setting="--workers")
        for outcome in results:
            read = ends.popleft()
            if spool is None:
                tally.add(outcome)
                sink.add(outcome.arrays)
            else:
                spool.add(outcome, read.end, read.input_bytes)
            documents, tokens = _counts(outcome)
            progress.advance(read.input_bytes, documents, tokens)
    if spool is None:
        return tally
    spool.commit()
    for arrays in spool.replay():
        sink.add(arrays)
    return spool.tally


def _counts(outcome: Outcome) -> tuple[int, int]:
    """Documents and tokens of an outcome, for the progress line."""
    lengths = [array for name, array in outcome.arrays.items() if name.endswith("lengths")]
    return len(lengths[0]) if lengths else 0, sum(int(array.sum(dtype=np.int64)) for array in lengths)
