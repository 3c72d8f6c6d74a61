"""Input files -> batches for the tokenising processes, and the place in the input at which each one ends.

The parent only reads. Files of lines (jsonl, txt) go to the processes as raw bytes, a block of whole lines at
a time, and are decoded and parsed there; other types are read row by row. A batch is bounded by its bytes, so
memory does not grow with the length of rows; one row is never cut.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardyard.data import sources
from shardyard.data.sources import BadRow, DatasetEntry, Row
from shardyard.data.sources.json_rows import is_blank, not_utf8, row_of_line
from shardyard.data.sources.readers import Policy
from shardyard.data.sources.rows import text_column, text_of_row

BATCH_BYTES = 1 << 19
"""Bytes of a batch. Large enough to pay for its way to a process, small enough that many fit in memory."""

_READ = 1 << 20

Text = tuple[str, str]
"""A document and where it stands."""


class Position(NamedTuple):
    """Where the input goes on: in a file of lines at a byte (decompressed) behind ``line`` lines, else behind
    ``rows`` rows of the entry.
    """

    entry: int = 0
    file: int = 0
    offset: int = 0
    line: int = 0
    rows: int = 0


START = Position()


@dataclass(frozen=True)
class Lines:
    """A block of whole lines of a file of the type ``kind`` (``.jsonl`` or ``.txt``)."""

    file: str
    kind: str
    first_line: int
    data: bytes


class Batch(NamedTuple):
    """What a process gets: the number of its entry, and lines, or rows that are read already."""

    entry: int
    content: Lines | list[Row | BadRow] | list[Text | BadRow]


class Read(NamedTuple):
    """A batch, where the input goes on after it, and the bytes of input files that it finishes."""

    batch: Batch
    end: Position
    input_bytes: int


@dataclass(frozen=True)
class Input:
    """What is read: ``texts`` reads documents for pretraining, else rows; ``max_rows`` of each entry."""

    entries: Sequence[DatasetEntry]
    texts: bool
    max_rows: int | None = None
    on_bad_row: Policy = "stop"

    @property
    def total_bytes(self) -> int:
        """The size of all files on disk."""
        return sum(file.stat().st_size for entry in self.entries for file in entry.files)

    def read(self, start: Position = START) -> Iterator[Read]:
        """The batches from ``start`` on.

        Raises:
            UserError: a file cannot be read or lacks a required column; a bad row, if it shows here.
        """
        for number, entry in enumerate(self.entries):
            if number < start.entry:
                continue
            begin = start if number == start.entry else Position(number)
            if entry.suffix in (".jsonl", ".txt") and entry.num_samples is None:
                yield from self._blocks(number, begin)
            else:
                yield from self._rows(number, begin)

    def texts_of(self, batch: Batch) -> Iterator[Text | BadRow]:
        """The documents of a batch of ``texts``; runs in a tokenising process.

        Raises:
            UserError: a bad row under ``stop``.
        """
        column = text_column(self.entries[batch.entry])
        for row in self._of(batch):
            text = row if isinstance(row, BadRow | tuple) else text_of_row(row, column)
            if isinstance(text, BadRow) and self.on_bad_row == "stop":
                raise text.error()
            yield text

    def rows_of(self, batch: Batch) -> Iterator[Row | BadRow]:
        """The rows of a batch; runs in a tokenising process.

        Raises:
            UserError: a bad row under ``stop``.
        """
        for row in self._of(batch):
            if isinstance(row, BadRow) and self.on_bad_row == "stop":
                raise row.error()
            if not isinstance(row, tuple):
                yield row

    def _of(self, batch: Batch) -> Iterator[Row | BadRow | Text]:
        if isinstance(batch.content, Lines):
            return _parse(batch.content)
        return iter(batch.content)

    def _blocks(self, number: int, begin: Position) -> Iterator[Read]:
        """Blocks of whole lines, each file from its own beginning."""
        entry, rows = self.entries[number], begin.rows
        if not self.texts and begin == Position(number):
            next(sources.iter_rows(entry, on_bad_row="skip"))  # refuses a file without the columns it needs
        for index, file in enumerate(entry.files):
            if index < begin.file or (self.max_rows is not None and rows >= self.max_rows):
                continue
            offset, line = (begin.offset, begin.line) if index == begin.file else (0, 0)
            compressed = file.suffix.lower() in (".gz", ".zst")
            with sources.open_bytes(file) as stream:
                _pass_over(stream, offset)
                while data := stream.read(BATCH_BYTES):
                    data += stream.readline()
                    if self.max_rows is not None:
                        data, taken = _first_rows(data, self.max_rows - rows)
                        rows += taken
                    block = Batch(number, Lines(str(file), entry.suffix, line + 1, data))
                    offset += len(data)
                    line += data.count(b"\n")
                    end = Position(number, index, offset, line, rows)
                    yield Read(block, end, 0 if compressed else len(data))
                    if self.max_rows is not None and rows >= self.max_rows:
                        break
            if compressed:
                end = Position(number, index, offset, line, rows)
                yield Read(Batch(number, []), end, file.stat().st_size)

    def _rows(self, number: int, begin: Position) -> Iterator[Read]:
        """Rows that are parsed here, in lists of about ``BATCH_BYTES``."""
        entry, position = self.entries[number], begin.rows
        iterate = sources.iter_texts if self.texts else sources.iter_rows
        rows: list[Any] = []
        size = finished = file = 0
        for row in iterate(entry, skip=position, on_bad_row=self.on_bad_row):
            if self.max_rows is not None and position >= self.max_rows:
                break
            while not _where(row).startswith(f"{entry.files[file]}:"):
                finished += entry.files[file].stat().st_size
                file += 1
            rows.append(row)
            position += 1
            size += _size(row)
            if size >= BATCH_BYTES:
                yield Read(Batch(number, rows), Position(number, rows=position), finished)
                rows, size, finished = [], 0, 0
        finished += sum(path.stat().st_size for path in entry.files[file:])
        yield Read(Batch(number, rows), Position(number, rows=position), finished)


def _pass_over(stream: io.BufferedReader, size: int) -> None:
    while size > 0 and (piece := stream.read(min(size, _READ))):
        size -= len(piece)


def _first_rows(data: bytes, count: int) -> tuple[bytes, int]:
    """The lines that hold the first ``count`` rows of a block, and how many they hold."""
    taken = end = 0
    while end < len(data) and taken < count:
        begin, end = end, data.find(b"\n", end) + 1 or len(data)
        taken += not is_blank(data[begin:end])
    return data[:end], taken


def _parse(block: Lines) -> Iterator[Row | BadRow | Text]:
    for number, raw in enumerate(block.data.split(b"\n"), start=block.first_line):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if is_blank(raw):
            continue
        where = f"{block.file}:{number}"
        try:
            line = raw.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            yield not_utf8(where, error.reason, error.start)
            continue
        yield (line, where) if block.kind == ".txt" else row_of_line(line, where)


def _where(row: Row | BadRow | Text) -> str:
    return row[1] if isinstance(row, tuple) else row.where


def _size(value: Any) -> int:
    """About the bytes of a row's text."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + 8
    if isinstance(value, Row):
        return _size(value.data)
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + sum(map(_size, value))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 8
