"""Rows to fine-tuning samples: read by one process, converted and encoded in the tokenising ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from shardyard.data import sources
from shardyard.data.converters import convert
from shardyard.data.pipeline import batched
from shardyard.data.report import Encoded
from shardyard.data.store import SampleBlock
from shardyard.data.types import Conversation, Sample


class FinetunePipeline:
    """The pipeline of ``data_manager_type: lf``; uses the first ``max_samples`` rows of each entry."""

    unit = "rows"

    def __init__(
        self, entries: Sequence[Any], encoder: Any, *, max_samples: int | None, batch_size: int
    ) -> None:
        self._entries = entries
        self._max_samples = max_samples
        self._batch_size = batch_size
        self.work = ConversationEncoder(entries, encoder)

    def batches(self) -> Iterator[list[tuple[int, Any]]]:
        rows = (
            (number, row)
            for number, entry in enumerate(self._entries)
            for row in islice(sources.iter_rows(entry), self._max_samples)
        )
        return batched(rows, self._batch_size)

    def collect(self, outcome: Encoded) -> Encoded:
        return outcome

    def rest(self) -> Encoded | None:
        return None


class ConversationEncoder:
    """A batch of (number of the entry, row) to samples; runs in a tokenising process."""

    def __init__(self, entries: Sequence[Any], encoder: Any) -> None:
        self._entries = entries
        self._encoder = encoder

    def __call__(self, batch: Sequence[tuple[int, Any]]) -> Encoded:
        samples: list[Sample] = []
        dropped: list[tuple[str, str]] = []
        truncated = split = 0
        for number, row in batch:
            conversation = convert(row, self._entries[number])
            outcome = (
                self._encoder.encode(conversation) if isinstance(conversation, Conversation) else conversation
            )
            if isinstance(outcome, list):
                samples += outcome
                split += len(outcome) > 1
            else:
                dropped.append((outcome.reason, outcome.where))
        return Encoded(SampleBlock.of(samples), len(batch), dropped, truncated, split)
