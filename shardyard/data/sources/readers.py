"""Files -> rows as Python objects, one reader per type; nothing infers a schema.

Each row carries ``where``: ``file:line`` in json, jsonl, csv and txt (csv: the line on which the row begins;
compressed files: the line within), ``file:row N`` (from 1) in parquet and arrow.

``skip`` passes over rows without parsing them: lines are counted, row groups and batches left out; a json
array and a csv file are scanned. ``on_bad_row`` says what a row that cannot be read does: ``stop`` raises
UserError, ``skip`` hands on a ``BadRow`` in its place, to be counted. A fault after which no next row can be
found (a cut-off file, malformed JSON inside an array, an open quote in a csv file) always raises.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, TypeAlias, overload

from shardyard.data.sources.columnar import columnar_rows
from shardyard.data.sources.csv_rows import csv_rows
from shardyard.data.sources.files import file_type
from shardyard.data.sources.json_rows import json_rows, jsonl_rows, lines
from shardyard.data.sources.row import BadRow, Row, Rows, Skip

Stop: TypeAlias = Literal["stop"]
Policy: TypeAlias = Literal["stop", "skip"]


@overload
def read_rows(
    file: Path, columns: Collection[str], skip: int | Skip = 0, on_bad_row: Stop = "stop"
) -> Iterator[Row]: ...
@overload
def read_rows(
    file: Path, columns: Collection[str], skip: int | Skip = 0, on_bad_row: Policy = "stop"
) -> Rows: ...
def read_rows(
    file: Path, columns: Collection[str], skip: int | Skip = 0, on_bad_row: Policy = "stop"
) -> Rows:
    """The rows of a json, jsonl, csv, parquet or arrow file after the first ``skip``, in its order.

    Parquet and arrow files are read in no other than ``columns``. Blank lines are no rows.

    Raises:
        UserError: the file cannot be read, or a row is bad (named by ``file:line``) under ``stop``.
    """
    for row in _reader(file, columns, skip if isinstance(skip, Skip) else Skip(skip)):
        if isinstance(row, BadRow) and on_bad_row == "stop":
            raise row.error()
        yield row


@overload
def text_lines(file: Path, skip: int | Skip = 0, on_bad_row: Stop = "stop") -> Iterator[tuple[str, str]]: ...
@overload
def text_lines(
    file: Path, skip: int | Skip = 0, on_bad_row: Policy = "stop"
) -> Iterator[tuple[str, str] | BadRow]: ...
def text_lines(
    file: Path, skip: int | Skip = 0, on_bad_row: Policy = "stop"
) -> Iterator[tuple[str, str] | BadRow]:
    """The lines of a text file that are not blank, without their line ends, and ``file:line`` of each.

    Only ``\\n`` and ``\\r\\n`` end a line. Raises UserError as ``read_rows`` does.
    """
    for line, where in lines(file, skip if isinstance(skip, Skip) else Skip(skip)):
        if not isinstance(line, BadRow):
            yield line, where
        elif on_bad_row == "stop":
            raise line.error()
        else:
            yield line


def count_rows(file: Path) -> int:
    """The rows of a file, bad ones too: from the metadata of parquet and arrow, by scanning others.

    Raises:
        UserError: the file cannot be read, or is at fault as a whole.
    """
    skip = Skip(sys.maxsize)
    rest = lines(file, skip) if file_type(file) == ".txt" else _reader(file, (), skip)
    return sum(1 for _ in rest) + sys.maxsize - skip.left


def _reader(file: Path, columns: Collection[str], skip: Skip) -> Rows:
    kind = file_type(file)
    if kind in (".parquet", ".arrow"):
        return columnar_rows(file, columns, skip)
    if kind == ".csv":
        return csv_rows(file, skip)
    if kind == ".json":
        return json_rows(file, skip)
    return jsonl_rows(file, skip)
