"""Rows of a set's public files: CSV, JSON, JSON lines (also gzipped) and parquet, each with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardyard.errors import UserError, first_line

Row = dict[str, Any]
"""A row, and under ``where`` its ``file:line``."""


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a file, by its name's ending. ``columns``: names for a CSV file that has no header.

    Raises:
        UserError: the file cannot be read, or a row is not what the ending says, with ``file:line``.
    """
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        text = _text(path)
    except UserError:
        raise
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {first_line(error)}") from error
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".csv":
        return list(_csv(path, text, columns))
    return list(_lines(path, text) if kind == ".jsonl" else _document(path, text))


def text_at(path: Path) -> str:
    """The text of a file, its lines ended by \\n alone.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return _text(path).replace("\r\n", "\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {first_line(error)}") from error


def _text(path: Path) -> str:
    held = path.read_bytes()
    held = gzip.decompress(held) if path.suffix == ".gz" else held
    return held.decode("utf-8-sig")


def _csv(path: Path, text: str, columns: Sequence[str] | None) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = list(columns) if columns else None
    line = 1
    try:
        for cells in reader:
            where, line = f"{path}:{line}", reader.line_num + 1
            if not cells:
                continue
            if names is None:
                names = [cell.strip() for cell in cells]
            elif len(cells) != len(names):
                raise UserError(f"{where}: {len(cells)} columns, where {len(names)} are wanted")
            else:
                yield {**dict(zip(names, cells, strict=True)), "where": where}
    except csv.Error as error:
        raise UserError(f"{path}:{line}: {error}") from error


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _document(path: Path, text: str) -> Iterator[Row]:
    """A JSON file: a list of rows, or an object with a list of them under ``examples`` or ``data``."""
    if not text.strip():
        return
    value = _parsed(text, str(path))
    if isinstance(value, dict):
        value = next((value[key] for key in ("examples", "data") if isinstance(value.get(key), list)), None)
    if not isinstance(value, list):
        raise UserError(f"{path}: no list of rows, and no object with one under examples or data")
    for number, row in enumerate(value, 1):
        yield _row(row, f"{path}:row {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise UserError(f"{where}: no JSON: {first_line(error)}") from error


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: a row is a JSON object, and this is {json.dumps(value)[:40]}")
    return {**value, "where": where}


def _parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{path}: {first_line(error)}") from error
    return [{**row, "where": f"{path}:row {number}"} for number, row in enumerate(rows, 1)]


def text_of(row: Row, name: str) -> str:
    """A column's text; numbers as they are written.

    Raises:
        UserError: the row has no such column, or no text in it.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{row['where']}: no text under {name!r}; the row has {_columns(row)}")
    return str(value)


def _columns(row: Row) -> str:
    return ", ".join(repr(name) for name in row if name != "where") or "nothing"
