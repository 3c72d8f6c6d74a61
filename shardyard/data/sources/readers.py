"""Files -> rows as Python objects, one reader per type; nothing infers a schema.

Each row carries ``where``: ``file:line`` in json, jsonl and txt, ``file:row N`` (from 1) in parquet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import UserError

_SPACE = " \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Row:
    """One row: its columns by name, and where it stands."""

    data: dict[str, Any]
    where: str


def read_rows(file: Path, columns: Collection[str]) -> Iterator[Row]:
    """The rows of a json, jsonl or parquet file, in its order. Parquet reads no other than ``columns``.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or a row is malformed (named by ``file:line``).
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(file, columns)
    if suffix == ".json":
        return _json_rows(file)
    return _jsonl_rows(file)


def parquet_columns(file: Path) -> list[str]:
    """The names of a parquet file's columns. Raises UserError if it is not one."""
    return list(_open_parquet(file).schema_arrow.names)


def text_lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank, without their line ends, and ``file:line`` of each.

    Only ``\\n`` and ``\\r\\n`` end a line: the other characters that Unicode counts as line ends belong to
    the text. Raises UserError if the file cannot be read or is not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                line = _decode(raw, f"{file}:{number}").rstrip("\r\n")
                if line.strip():
                    yield line, f"{file}:{number}"
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for line, where in text_lines(file):
        yield _as_row(_parse(line, where), where)


def _json_rows(file: Path) -> Iterator[Row]:
    """A JSON array of objects, read element by element; or one object per line, as some name such files."""
    try:
        text = _decode(file.read_bytes().removeprefix(_BOM), str(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    start = _skip_space(text, 0)
    if text[start : start + 1] == "[":
        yield from _array_rows(text, start, file)
    elif start < len(text):
        yield from _jsonl_rows(file)


def _array_rows(text: str, start: int, file: Path) -> Iterator[Row]:
    decoder = json.JSONDecoder()
    position = _skip_space(text, start + 1)
    line, counted = 1, 0
    expect_row = text[position : position + 1] != "]"
    while expect_row:
        line, counted = line + text.count("\n", counted, position), position
        where = f"{file}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _malformed(f"{file}:{error.lineno}", error.msg, error.colno) from error
        except RecursionError as error:
            raise UserError(f"{where}: the row is nested too deeply") from error
        yield _as_row(value, where)
        position = _skip_space(text, position)
        expect_row = text[position : position + 1] == ","
        if expect_row:
            position = _skip_space(text, position + 1)
    line += text.count("\n", counted, position)
    if text[position : position + 1] != "]":
        raise UserError(f"{file}:{line}: not valid JSON: ',' or ']' must follow a row; is the file cut off?")
    if _skip_space(text, position + 1) < len(text):
        raise UserError(f"{file}:{line}: not valid JSON: something follows the end of the array")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise _malformed(where, error.msg, error.colno) from error
    except RecursionError as error:
        raise UserError(f"{where}: the row is nested too deeply") from error


def _malformed(where: str, message: str, column: int) -> UserError:
    return UserError(f"{where}: not valid JSON: {message} (column {column}); mend or remove this row")


def _as_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: a row must be an object with named columns, found {type(value).__name__}")
    return Row(value, where)


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from error


def parquet_rows(file: Path) -> int:
    """The number of rows of a parquet file. Raises UserError if it is not one."""
    return _open_parquet(file).metadata.num_rows


def _open_parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file: {_first_line(error)}") from error


def _parquet_rows(file: Path, columns: Collection[str]) -> Iterator[Row]:
    import pyarrow

    table = _open_parquet(file)
    present = [name for name in table.schema_arrow.names if name in columns]
    number = 0
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=present):
            for data in batch.to_pylist():
                number += 1
                yield Row({key: _without_nulls(value) for key, value in data.items()}, f"{file}:row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: broken after row {number}: {_first_line(error)}") from error


def _without_nulls(value: Any) -> Any:
    """Drop the null fields of nested structs: parquet gives every struct the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
