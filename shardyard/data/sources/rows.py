"""An entry's rows and texts: its files one after another, in the same order on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np

from shardyard.data.sources.entry import FORMATS, DatasetEntry
from shardyard.data.sources.readers import Row, parquet_columns, read_rows, text_lines
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

NUM_SAMPLES_SEED = 42
"""Seed of the draw that ``num_samples`` makes: fixed, so that a dataset means the same rows in every run."""

_WINDOW = 100
"""Rows of a file in which a required column has to appear; later rows without it are dropped one by one."""


def iter_rows(entry: DatasetEntry) -> Iterator[Row]:
    """The rows of an entry for fine-tuning.

    ``num_samples: n`` takes n of the N rows, drawn without replacement by a fixed seed, in file order; past N
    every row comes n // N times and n % N of them once more, copies side by side.

    Raises:
        UserError: a file cannot be read or holds a malformed row, a required column is missing, no rows.
    """
    if entry.suffix == ".txt":
        raise UserError(
            f"data.dataset: {entry.files[0]}: txt files hold text for pretraining (stage: pt); "
            f"conversations are read from json, jsonl and parquet"
        )
    copies = None if entry.num_samples is None else _copies(entry, entry.num_samples)
    number = -1
    for number, row in enumerate(_all_rows(entry, tell=True)):
        for _ in range(1 if copies is None else int(copies[number])):
            yield row
    if number < 0:
        raise UserError(f"data.dataset: {entry.name}: no rows in {', '.join(map(str, entry.files))}")


def iter_texts(entry: DatasetEntry) -> Iterator[tuple[str, str]]:
    """The documents of an entry for pretraining, and where each stands; null is the empty text.

    Lines of txt files, else the column ``text``. ``columns: {text: name}`` names another; so does
    ``{prompt: name}``, as LLaMA-Factory's files write it.

    Raises:
        UserError: as ``iter_rows``; also a row whose column is missing or holds something else than text.
    """
    if entry.num_samples is not None:
        raise UserError(f"data.dataset: {entry.name}: num_samples is for fine-tuning; use data.max_samples")
    column = _text_column(entry)
    for file in entry.files:
        if file.suffix.lower() == ".txt":
            yield from text_lines(file)
            continue
        if file.suffix.lower() == ".parquet":
            _require_text(column, parquet_columns(file), str(file))
        for row in read_rows(file, {column}):
            _require_text(column, row.data, row.where)
            text = row.data[column]
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"{row.where}: column {column!r} must hold text, found {kind}")
            yield text or "", row.where


def _text_column(entry: DatasetEntry) -> str:
    listed = entry.named_columns or ()
    column = entry.columns.prompt if "prompt" in listed and "text" not in listed else entry.columns.text
    if column is None:
        raise UserError(f"data.dataset: {entry.name}: columns.text is null; name the column of the documents")
    return column


def _require_text(column: str, found: object, where: str) -> None:
    names = sorted(found) if isinstance(found, dict | list) else []
    if column not in names:
        raise UserError(
            f"{where}: no column {column!r} for pretraining; columns found: {', '.join(names) or 'none'}. "
            f"Name the column of the documents in the entry: columns: {{text: NAME}}"
        )


def _all_rows(entry: DatasetEntry, *, tell: bool) -> Iterator[Row]:
    wanted = _wanted_columns(entry)
    for number, file in enumerate(entry.files):
        rows = read_rows(file, wanted)
        window = list(islice(rows, _WINDOW))
        if window:
            found = {str(name) for row in window for name in row.data}
            _require_columns(entry, file, found)
        if number == 0 and tell:
            _tell_of_kept_defaults(entry, window)
            _tell_of_unnamed_columns(entry, file, window)
        yield from chain(window, rows)


def _wanted_columns(entry: DatasetEntry) -> set[str]:
    columns = entry.columns
    own = [columns.messages]
    if entry.formatting == "alpaca":
        own = [columns.prompt, columns.query, columns.response, columns.history]
    return {name for name in [columns.system, columns.tools, *own] if name is not None}


def _require_columns(entry: DatasetEntry, file: Path, found: set[str]) -> None:
    """Refuse a file without the columns that carry the conversation, and list those that it has."""
    columns = entry.columns
    required: dict[str, tuple[str | None, ...]] = {"messages": (columns.messages,)}
    if entry.formatting == "alpaca":
        required = {"response": (columns.response,), "prompt": (columns.prompt, columns.query)}
    for key, names in required.items():
        if found.intersection(name for name in names if name is not None):
            continue
        if file.suffix.lower() == ".parquet":  # only the wanted columns were read
            found = set(parquet_columns(file))
        looked_for = " or ".join(repr(name) for name in names if name is not None) or "nothing (it is null)"
        raise UserError(
            f"{file}: formatting {entry.formatting} needs the column {key!r}, looked for {looked_for}; "
            f"columns found: {', '.join(sorted(found)) or 'none'}. Name it in the entry, "
            f"columns: {{{key}: NAME}}, or set another formatting ({', '.join(FORMATS)})"
        )


def _tell_of_kept_defaults(entry: DatasetEntry, window: list[Row]) -> None:
    """Say which unlisted columns are used that the reference would leave out (it nulls all unlisted ones)."""
    if entry.formatting != "alpaca" or entry.named_columns is None:
        return
    for key in ("prompt", "query"):
        name = getattr(entry.columns, key)
        if key not in entry.named_columns and any(row.data.get(name) for row in window):
            _log.warning(
                "dataset %s: `columns` does not list %s, so it keeps its default, the column %r, which the "
                "rows have (the reference would ignore it); write `%s: null` to leave it out",
                *(entry.name, key, name, key),
            )


_OPTIONAL = ("system", "tools", "history")


def _tell_of_unnamed_columns(entry: DatasetEntry, file: Path, window: list[Row]) -> None:
    """Say which columns with a usual name hold something and are used by nobody: null is their default."""
    found = set(parquet_columns(file)) if file.suffix.lower() == ".parquet" else None
    for key in _OPTIONAL:
        held = key in found if found is not None else any(row.data.get(key) for row in window)
        if held and getattr(entry.columns, key) is None and key not in (entry.named_columns or ()):
            _log.warning(
                "dataset %s: the rows have a column %r that no key of the entry names, so it is not used; "
                "write "
                "columns: {%s: %s} to use it, or {%s: null} to say so",
                *(entry.name, key, key, key, key),
            )


def _copies(entry: DatasetEntry, num_samples: int) -> np.ndarray:
    """How often each row is taken, int64 [N]; sums to ``num_samples`` unless there are no rows."""
    num_rows = sum(1 for _ in _all_rows(entry, tell=False))
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64)
    copies = np.full(num_rows, num_samples // num_rows, dtype=np.int64)
    drawn = np.random.default_rng(NUM_SAMPLES_SEED).permutation(num_rows)[: num_samples % num_rows]
    copies[drawn] += 1
    return copies
