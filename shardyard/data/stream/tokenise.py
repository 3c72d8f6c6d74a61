"""The rows of one window -> its samples, and the units (samples, or packs of them) that batches are made of.

All of it is a function of (seed, epoch, window) and the rows: no token, sample or pack is left open at a
window's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardyard.data.finetune import ConversationEncoder, Encodes
from shardyard.data.order import Units, epoch_order
from shardyard.data.packing import best_fit
from shardyard.data.pipeline import batched
from shardyard.data.pretrain import Documents, DocumentTokenizer, Windows
from shardyard.data.report import Encoded, Report
from shardyard.data.sources import BadRow, DatasetEntry
from shardyard.data.store import SampleBlock
from shardyard.data.stream.address import MAX_NUMBERS
from shardyard.data.stream.reader import RowReader
from shardyard.data.workers import ordered_map
from shardyard.errors import UserError

TOO_SHORT = "a window of fewer than two tokens"

_UNITS = 2**32
"""Keeps the order of a window's units apart from that of its rows."""


@dataclass(frozen=True)
class TokenisedWindow:
    """Its samples in blocks; ``units`` number them from 0 through all blocks."""

    blocks: Sequence[SampleBlock]
    units: Units
    report: Report
    is_last: bool
    """Whether the epoch is known to end with it."""


class Method(Protocol):
    """How rows become samples."""

    unit: str
    """What a row is called, in the plural."""

    @property
    def work(self) -> Callable[[Any], Any]:
        """Turns a batch of items into an outcome, in any process."""
        ...

    def item(self, source: int, row: Any) -> Any:
        """What ``work`` reads of a row."""
        ...

    def encoded(self, outcomes: Iterable[Any], items: Sequence[Any]) -> Iterator[Encoded]:
        """The samples of a window's outcomes, in order; ``items`` are all that went in."""
        ...

    def units(self, lengths: np.ndarray, order: Callable[[int], np.ndarray]) -> Units:
        """The units of samples with these lengths; ``order(n)`` is a random order of n things."""
        ...


class Conversations:
    """Each row a conversation; with ``capacity``, packs of at most that many tokens."""

    unit = "rows"

    def __init__(self, entries: Sequence[DatasetEntry], encoder: Encodes, *, capacity: int | None) -> None:
        self._capacity = capacity
        self.work = ConversationEncoder(entries, encoder)

    def item(self, source: int, row: Any) -> Any:
        return source, row

    def encoded(self, outcomes: Iterable[Encoded], items: Sequence[Any]) -> Iterator[Encoded]:
        yield from outcomes

    def units(self, lengths: np.ndarray, order: Callable[[int], np.ndarray]) -> Units:
        if self._capacity is None:
            return Units.singles(np.arange(len(lengths), dtype=np.int64))
        return Units.packs(best_fit(lengths, self._capacity))


class TokenStream:
    """Each row a document; the tokens of a window's documents, end to end, are cut into samples."""

    unit = "documents"

    def __init__(self, tokenize: DocumentTokenizer, *, cutoff_len: int, reset_attention_mask: bool) -> None:
        self._cutoff_len = cutoff_len
        self._reset = reset_attention_mask
        self.work = tokenize

    def item(self, source: int, row: Any) -> Any:
        return row

    def encoded(self, outcomes: Iterable[Documents], items: Sequence[Any]) -> Iterator[Encoded]:
        stream = Windows(self._cutoff_len, reset_attention_mask=self._reset)
        tokens, dropped = 0, set[str]()
        for documents in outcomes:
            tokens += len(documents.tokens)
            dropped.update(where for _, where in documents.dropped)
            yield Encoded(stream.push(documents), documents.rows, documents.dropped)
        too_short = [(TOO_SHORT, where) for _, where in items if where not in dropped] if tokens < 2 else []
        yield Encoded(stream.flush(), 0, too_short)

    def units(self, lengths: np.ndarray, order: Callable[[int], np.ndarray]) -> Units:
        # A long document's samples would otherwise come one after the other.
        return Units.singles(order(len(lengths)))


class WindowMaker:
    """Makes any window of a stream."""

    def __init__(
        self,
        reader: RowReader,
        method: Method,
        *,
        seed: int,
        shuffle: bool,
        batch_size: int,
        vocab_size: int | None = None,
    ) -> None:
        """Token ids from ``vocab_size`` on are refused."""
        self.unit = method.unit
        self._reader = reader
        self._method = method
        self._seed = seed
        self._shuffle = shuffle
        self._batch_size = batch_size
        self._vocab_size = vocab_size

    def make(self, epoch: int, window: int, workers: int = 1) -> TokenisedWindow | None:
        """The window, tokenised by ``workers`` processes; None past the epoch's last row.

        Raises:
            UserError: a row cannot be read, or is of a model with another vocabulary.
        """
        rows = self._reader.rows(window)
        if not rows:
            return None
        order = self._order(len(rows), epoch, window + 1)
        shuffled = [rows[number] for number in order.tolist()]
        report = Report(self.unit)
        blocks: list[SampleBlock] = []
        dropped: list[tuple[str, str]] = []
        notes: list[tuple[str, str]] = []
        for encoded in self._encode(shuffled, workers):
            report.add(Encoded(encoded.block, encoded.rows, (), encoded.truncated, encoded.split))
            dropped += encoded.dropped
            notes += encoded.notes
            blocks.append(encoded.block)
        report.add(Encoded(SampleBlock.of([]), 0, _as_read(dropped, rows), notes=_as_read(notes, rows)))
        self._check(report)
        lengths = np.concatenate([np.empty(0, np.int32), *(block.lengths for block in blocks)])
        units = self._method.units(lengths, lambda size: self._order(size, epoch, _UNITS + window))
        return TokenisedWindow(blocks, units, report, is_last=len(rows) < self._reader.rows_per_window)

    def _encode(self, rows: Sequence[tuple[int, Any]], workers: int) -> Iterator[Encoded]:
        bad = [(row.reason, row.where) for _, row in rows if isinstance(row, BadRow)]
        if bad:
            yield Encoded(SampleBlock.of([]), len(bad), bad)
        items = [self._method.item(source, row) for source, row in rows if not isinstance(row, BadRow)]
        outcomes = ordered_map(self._method.work, batched(items, self._batch_size), workers=workers)
        yield from self._method.encoded(outcomes, items)

    def _order(self, size: int, epoch: int, stream: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        return epoch_order(size, self._seed, epoch, stream)

    def _check(self, report: Report) -> None:
        if report.samples > MAX_NUMBERS:
            raise UserError(
                f"data.buffer_size: a window of {report.rows} {self.unit} became {report.samples} samples, "
                f"more than a position can count ({MAX_NUMBERS}); lower it"
            )
        if self._vocab_size is not None and report.largest_id >= self._vocab_size:
            raise UserError(
                f"model.tokenizer_name_or_path: the data holds token id {report.largest_id}, but the model's "
                f"vocabulary has {self._vocab_size} entries; use the tokenizer that belongs to the model"
            )


def _as_read(told: Sequence[tuple[str, str]], rows: Sequence[tuple[int, Any]]) -> Sequence[tuple[str, str]]:
    """In the order of reading, so that the first place of a reason is the first in the files."""
    if not told:
        return ()
    places = {_where(row): number for number, (_, row) in enumerate(rows)}
    return sorted(told, key=lambda reason: places.get(reason[1], 0))


def _where(row: Any) -> str:
    return row[1] if isinstance(row, tuple) else row.where
