"""Rows to fine-tuning samples: read by one process, converted and encoded in the tokenising ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from shardyard.data import sources
from shardyard.data.converters import Dropped, convert
from shardyard.data.encode import TRUNCATED, Samples
from shardyard.data.pipeline import batched
from shardyard.data.report import Encoded
from shardyard.data.sources import BadRow, DatasetEntry, Row
from shardyard.data.sources.readers import Policy
from shardyard.data.store import SampleBlock
from shardyard.data.types import Conversation, Sample


class Encodes(Protocol):
    """What turns a conversation into samples: an ``Encoder``."""

    def encode(self, conversation: Conversation, /) -> Samples | Dropped: ...


class FinetunePipeline:
    """The pipeline of ``data_manager_type: lf``; uses the first ``max_samples`` rows of each entry."""

    unit = "rows"

    def __init__(
        self,
        entries: Sequence[DatasetEntry],
        encoder: Encodes,
        *,
        max_samples: int | None,
        batch_size: int,
        on_bad_row: Policy = "stop",
    ) -> None:
        self._entries = entries
        self._on_bad_row: Policy = on_bad_row
        self._max_samples = max_samples
        self._batch_size = batch_size
        self._rows_read = 0
        self.work = ConversationEncoder(entries, encoder)

    def batches(self) -> Iterator[list[tuple[int, Row | BadRow]]]:
        rows = (
            (number, row)
            for number, entry in enumerate(self._entries)
            for row in islice(sources.iter_rows(entry, on_bad_row=self._on_bad_row), self._max_samples)
        )
        return batched(rows, self._batch_size)

    def collect(self, outcome: Encoded) -> Encoded:
        """The outcome, its rows counted through the whole input."""
        assert outcome.block.rows is not None
        block = replace(outcome.block, rows=outcome.block.rows + self._rows_read)
        self._rows_read += outcome.rows
        return replace(outcome, block=block)

    def rest(self) -> Encoded | None:
        return None


class ConversationEncoder:
    """A batch of (number of the entry, row) to samples; runs in a tokenising process.

    Samples know their row by its place in the batch.
    """

    def __init__(self, entries: Sequence[DatasetEntry], encoder: Encodes) -> None:
        self._entries = entries
        self._encoder = encoder

    def __call__(self, batch: Sequence[tuple[int, Row | BadRow]]) -> Encoded:
        samples: list[Sample] = []
        flags: list[int] = []
        rows: list[int] = []
        dropped: list[tuple[str, str]] = []
        notes: list[tuple[str, str]] = []
        truncated = split = 0
        for place, (number, row) in enumerate(batch):
            outcome = self._encode(number, row)
            if isinstance(outcome, Samples):
                samples += outcome
                flags += outcome.flags or [0] * len(outcome)
                rows += [place] * len(outcome)
                notes += [(note, row.where) for note in outcome.notes if note != TRUNCATED]
                truncated += outcome.truncated
                split += len(outcome) > 1
            else:
                dropped.append((outcome.reason, outcome.where))
        block = SampleBlock.of(samples, flags=flags, rows=rows)
        return Encoded(block, len(batch), dropped, truncated, split, notes)

    def _encode(self, number: int, row: Row | BadRow) -> Samples | Dropped | BadRow:
        if isinstance(row, BadRow):
            return row
        conversation = convert(row, self._entries[number])
        return conversation if isinstance(conversation, Dropped) else self._encoder.encode(conversation)
