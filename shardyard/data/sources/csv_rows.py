"""Rows of csv files: a header, then a record per row; fields may hold line ends inside quotes."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardyard.data.sources.files import open_bytes
from shardyard.data.sources.json_rows import not_utf8
from shardyard.data.sources.row import BadRow, Row, Rows, Skip
from shardyard.errors import UserError

_LONGEST_FIELD = 2**31 - 1
"""Characters; the csv module's own limit of 131072 is far below a long document's length."""


def csv_rows(file: Path, skip: Skip) -> Rows:
    """The records below the header. Values are text; an empty field is null. ``where`` is the first line.

    A fault of quoting ends the file under any policy: where the next record begins cannot be told.
    """
    if csv.field_size_limit() < _LONGEST_FIELD:  # one limit for the whole process; there is no local one
        csv.field_size_limit(_LONGEST_FIELD)
    with open_bytes(file) as stream:
        lines = _Lines(stream)
        records = _records(file, lines)
        header: list[str] | None = None
        for fields, where in records:
            fault = lines.take_fault()
            if header is None:
                if fault is not None:
                    raise not_utf8(where, *fault).error()
                header = _header(fields, where)
            elif not skip.takes_one():
                yield _row(header, fields, where) if fault is None else not_utf8(where, *fault)


def _records(file: Path, lines: _Lines) -> Iterator[tuple[list[str], str]]:
    reader = csv.reader(lines, strict=True)
    width = 0
    while True:
        where = f"{file}:{reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{where}: not valid csv in the row that begins here: {error}; are the quotes in its fields "
                f"closed and doubled?"
            ) from error
        blank = not fields or (width != 1 and len(fields) == 1 and not fields[0].strip())
        if not blank:
            width = width or len(fields)
            yield fields, where


class _Lines:
    """The lines of a stream, each with its end; remembers the first that is not UTF-8."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._first = True
        self._fault: tuple[str, int] | None = None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = next(self._stream)
        if self._first:
            self._first, raw = False, raw.removeprefix(b"\xef\xbb\xbf")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._fault = self._fault or (error.reason, error.start)
            return raw.decode("utf-8", "replace")

    def take_fault(self) -> tuple[str, int] | None:
        """The fault of the lines since the last call: its reason, and the byte of its line."""
        fault, self._fault = self._fault, None
        return fault


def _header(fields: list[str], where: str) -> list[str]:
    twice = [name for name, count in Counter(fields).items() if count > 1]
    if twice:
        raise UserError(f"{where}: the header names the column {twice[0]!r} more than once")
    return fields


def _row(header: list[str], fields: list[str], where: str) -> Row | BadRow:
    if len(fields) != len(header):
        return BadRow(
            "wrong number of fields",
            where,
            f"a row of {len(fields)} fields under a header of {len(header)}; quote fields that hold commas",
        )
    return Row({name: value or None for name, value in zip(header, fields, strict=True)}, where)
