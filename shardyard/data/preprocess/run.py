"""Batches through the processes, their outcomes in order to where they are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardyard.data.preprocess.batches import Batch, Input, Position, Read
from shardyard.data.preprocess.outcome import Outcome, Tally
from shardyard.data.preprocess.sinks import Output
from shardyard.data.preprocess.spool import Spool
from shardyard.data.progress import InputProgress
from shardyard.data.workers import ordered_map
from shardyard.errors import UserError


class Sink(Protocol):
    """Where outcomes end."""

    @property
    def output(self) -> Output: ...

    def add(self, arrays: dict[str, np.ndarray], /) -> None:
        """Append an outcome's arrays."""
        ...

    def close(self) -> None:
        """Append what was held back; no outcome follows."""
        ...

    def counts(self) -> dict[str, Any]:
        """What was written, under the words that tell it."""
        ...


@dataclass(frozen=True)
class Pace:
    """How the work is done; none of it changes a byte of the result."""

    workers: int = 1
    setting: str = "--workers"
    """What the user turns to change ``workers``, for messages."""
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
        results = ordered_map(work, batches(start), workers=pace.workers, setting=pace.setting)
        for outcome in results:
            read = ends.popleft()
            if spool is None:
                tally.add(outcome)
                sink.add(outcome.arrays)
            else:
                spool.add(outcome, read.end, read.input_bytes)
            documents, tokens = _counts(outcome)
            progress.advance(read.input_bytes, documents, tokens)
    if spool is not None:
        spool.commit()
        tally = spool.tally
        for arrays in spool.replay():
            sink.add(arrays)
    sink.close()
    return tally


def require_rows(source: Input, tally: Tally, written: int) -> None:
    """Raise UserError, with the counts, unless something was written."""
    if written:
        return
    names = ", ".join(entry.name for entry in source.entries)
    told = "".join(
        f"; {reason}: {drop.count} (first: {drop.first})" for reason, drop in tally.dropped.items()
    )
    raise UserError(f"{names}: none of {tally.rows} rows is left to write{told}")


def _counts(outcome: Outcome) -> tuple[int, int]:
    """Documents and tokens of an outcome, for the progress line."""
    lengths = [array for name, array in outcome.arrays.items() if name.endswith("lengths")]
    return len(lengths[0]) if lengths else 0, sum(int(array.sum(dtype=np.int64)) for array in lengths)
