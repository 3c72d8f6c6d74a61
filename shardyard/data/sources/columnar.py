"""Rows of parquet and arrow files, as Python objects; only the wanted columns are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardyard.data.sources.files import CHUNK, file_type
from shardyard.data.sources.row import Row, Rows, Skip
from shardyard.errors import UserError, first_line

_BATCH_ROWS = 1000
_ARROW_FILE = b"ARROW1"
"""First bytes of an arrow file that can be read from any place; a stream has others."""


def columns_of(file: Path) -> list[str] | None:
    """The names of a parquet or arrow file's columns; None: other types tell them with each row.

    Raises:
        UserError: it is not a file of its type.
    """
    kind = file_type(file)
    if kind == ".parquet":
        with _parquet(file) as table:
            return list(table.schema_arrow.names)
    if kind == ".arrow":
        with _arrow(file, None) as reader:
            return list(reader.schema.names)
    return None


def parquet_rows(file: Path) -> int:
    """The number of rows of a parquet file. Raises UserError if it is not one."""
    with _parquet(file) as table:
        return table.metadata.num_rows


def columnar_rows(file: Path, columns: Collection[str], skip: Skip) -> Rows:
    """The rows of a parquet or arrow file; row groups and batches that are skipped whole are not decoded."""
    import pyarrow

    batches = _parquet_batches if file_type(file) == ".parquet" else _arrow_batches
    number = 0
    try:
        for first, batch in batches(file, columns, skip):
            number = first
            for begin in range(0, batch.num_rows, _BATCH_ROWS):
                for data in batch.slice(begin, _BATCH_ROWS).to_pylist():
                    number += 1
                    row = {key: _without_nulls(value) for key, value in data.items()}
                    yield Row(row, f"{file}:row {number}")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{file}: broken after row {number}: {first_line(error)}") from error


def _parquet_batches(file: Path, columns: Collection[str], skip: Skip) -> Iterator[tuple[int, Any]]:
    """Batches of rows, and how many rows of the file stand before each."""
    with _parquet(file) as table:
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.metadata.num_row_groups)]
        begin = group = 0
        while group < len(sizes) and skip.left >= sizes[group]:
            begin += skip.takes(sizes[group])
            group += 1
        present = [name for name in table.schema_arrow.names if name in columns]
        groups = list(range(group, len(sizes)))
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=present):
            skipped = skip.takes(batch.num_rows)
            yield begin + skipped, batch.slice(skipped)
            begin += batch.num_rows


def _arrow_batches(file: Path, columns: Collection[str], skip: Skip) -> Iterator[tuple[int, Any]]:
    begin = 0
    with _arrow(file, columns) as reader:
        for batch in _record_batches(reader):
            skipped = skip.takes(batch.num_rows)
            if skipped < batch.num_rows:
                batch.validate(full=True)  # offsets of a damaged file would be read past its end
                yield begin + skipped, batch.slice(skipped)
            begin += batch.num_rows


def _record_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


@contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:  # a buffer, so that a column of a row group is not read as a whole
        table = pyarrow.parquet.ParquetFile(file, buffer_size=CHUNK)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file: {first_line(error)}") from error
    with table:
        yield table


@contextmanager
def _arrow(file: Path, columns: Collection[str] | None) -> Iterator[Any]:
    """An arrow file or stream, mapped into memory, of which ``columns`` are read (None: all)."""
    import pyarrow
    import pyarrow.ipc

    try:
        source = pyarrow.memory_map(str(file))
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        opens = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        source.seek(0)
        reader = opens(source)
        if columns is not None:
            fields = [n for n, name in enumerate(reader.schema.names) if name in columns]
            source.seek(0)
            reader = opens(source, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable arrow file: {first_line(error)}") from error
    with source:
        yield reader


def _without_nulls(value: Any) -> Any:
    """Drop the null fields of nested structs: parquet gives every struct the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
