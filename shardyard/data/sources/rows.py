"""An entry's rows and texts: its files one after another, in the same order on every rank."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, overload

from shardyard.data.sources.columnar import columns_of
from shardyard.data.sources.entry import FORMATS, DatasetEntry
from shardyard.data.sources.files import file_type
from shardyard.data.sources.readers import Policy, Stop, count_rows, read_rows, text_lines
from shardyard.data.sources.row import BadRow, Row, Rows, Skip
from shardyard.errors import UserError

if TYPE_CHECKING:
    import numpy as np

Text: TypeAlias = tuple[str, str]
"""A document and where it stands."""

_log = logging.getLogger("shardyard.data")

NUM_SAMPLES_SEED = 42
"""Seed of the draw that ``num_samples`` makes: fixed, so that a dataset means the same rows in every run."""

_WINDOW = 100
"""Rows of a file in which a required column has to appear; later rows without it are dropped one by one."""


@overload
def iter_rows(entry: DatasetEntry, skip: int = 0, on_bad_row: Stop = "stop") -> Iterator[Row]: ...
@overload
def iter_rows(entry: DatasetEntry, skip: int = 0, on_bad_row: Policy = "stop") -> Rows: ...
def iter_rows(entry: DatasetEntry, skip: int = 0, on_bad_row: Policy = "stop") -> Rows:
    """The rows of an entry for fine-tuning, after the first ``skip`` of them.

    ``num_samples: n`` takes n of the N rows, drawn without replacement by a fixed seed, in file order; past N
    every row comes n // N times and n % N of them once more, copies side by side. A bad row counts as a row.

    Raises:
        UserError: a file cannot be read, a required column is missing, no rows; a bad row under ``stop``.
    """
    if entry.suffix == ".txt":
        raise UserError(
            f"data.dataset: {entry.files[0]}: txt files hold text for pretraining (stage: pt): a line is no "
            f"conversation. Conversations are read from json, jsonl, csv, parquet and arrow"
        )
    if entry.num_samples is not None:
        yield from _drawn_rows(entry, skip, on_bad_row)
        return
    number = -1
    for number, row in enumerate(_all_rows(entry, Skip(skip), on_bad_row)):  # noqa: B007
        yield row
    if number < 0 and not skip:
        raise _no_rows(entry)


def _drawn_rows(entry: DatasetEntry, skip: int, on_bad_row: Policy) -> Rows:
    copies = _copies(entry)
    if not len(copies):
        raise _no_rows(entry)
    ends = copies.cumsum()
    first = int(ends.searchsorted(skip, side="right")) if skip else 0
    if first == len(copies):
        return
    copies[first] = ends[first] - skip
    for number, row in enumerate(_all_rows(entry, Skip(first), on_bad_row), start=first):
        for _ in range(int(copies[number])):
            yield row


def _no_rows(entry: DatasetEntry) -> UserError:
    return UserError(f"data.dataset: {entry.name}: no rows in {', '.join(map(str, entry.files))}")


@overload
def iter_texts(entry: DatasetEntry, skip: int = 0, on_bad_row: Stop = "stop") -> Iterator[Text]: ...
@overload
def iter_texts(
    entry: DatasetEntry, skip: int = 0, on_bad_row: Policy = "stop"
) -> Iterator[Text | BadRow]: ...
def iter_texts(entry: DatasetEntry, skip: int = 0, on_bad_row: Policy = "stop") -> Iterator[Text | BadRow]:
    """The documents of an entry for pretraining, and where each stands; null is the empty text.

    Lines of txt files, else the column ``text``. ``columns: {text: name}`` names another; so does
    ``{prompt: name}``, as LLaMA-Factory's files write it. The first ``skip`` documents are left out.

    Raises:
        UserError: a file cannot be read; under ``stop`` also a bad row, one whose column is missing or holds
            something else than text.
    """
    if entry.num_samples is not None:
        raise UserError(f"data.dataset: {entry.name}: num_samples is for fine-tuning; use data.max_samples")
    column = text_column(entry)
    left = Skip(skip)
    for file in entry.files:
        if file_type(file) == ".txt":
            yield from text_lines(file, left, on_bad_row)
            continue
        found = columns_of(file)
        if found is not None:
            _require_text(column, found, str(file))
        for row in read_rows(file, {column}, left, on_bad_row):
            text = row if isinstance(row, BadRow) else text_of_row(row, column)
            if isinstance(text, BadRow) and on_bad_row == "stop":
                raise text.error()
            yield text


def count_entry_rows(entry: DatasetEntry) -> int:
    """The rows of all files of an entry (documents: the same), whatever ``num_samples`` takes of them."""
    return sum(count_rows(file) for file in entry.files)


def text_column(entry: DatasetEntry) -> str:
    listed = entry.named_columns or ()
    column = entry.columns.prompt if "prompt" in listed and "text" not in listed else entry.columns.text
    if column is None:
        raise UserError(f"data.dataset: {entry.name}: columns.text is null; name the column of the documents")
    return column


def text_of_row(row: Row, column: str) -> Text | BadRow:
    if column not in row.data:
        return BadRow(f"no column {column!r}", row.where, _no_text(column, row.data))
    text = row.data[column]
    if text is not None and not isinstance(text, str):
        reason = f"column {column!r} must hold text"
        return BadRow(reason, row.where, f"{reason}, found {type(text).__name__}")
    return text or "", row.where


def _require_text(column: str, found: Collection[str], where: str) -> None:
    if column not in found:
        raise UserError(f"{where}: {_no_text(column, found)}")


def _no_text(column: str, found: Collection[str]) -> str:
    return (
        f"no column {column!r} for pretraining; columns found: {', '.join(sorted(found)) or 'none'}. "
        f"Name the column of the documents in the entry: columns: {{text: NAME}}"
    )


def _all_rows(entry: DatasetEntry, skip: Skip, on_bad_row: Policy) -> Rows:
    """The rows of all files. A file that is entered in its middle was looked at when its first row came."""
    wanted = _wanted_columns(entry)
    for number, file in enumerate(entry.files):
        at_start = skip.left == 0
        rows = read_rows(file, wanted, skip, on_bad_row)
        if at_start:
            window = list(islice(rows, _WINDOW))
            good = [row for row in window if isinstance(row, Row)]
            if good:
                found = {str(name) for row in good for name in row.data}
                _require_columns(entry, file, found)
            if number == 0:
                _tell_of_kept_defaults(entry, good)
                _tell_of_unnamed_columns(entry, file, good)
            rows = chain(window, rows)
        yield from rows


def _wanted_columns(entry: DatasetEntry) -> set[str]:
    columns = entry.columns
    own = [columns.messages]
    if entry.formatting == "alpaca":
        own = [columns.prompt, columns.query, columns.response, columns.history]
    if entry.ranking:
        own += [columns.chosen, columns.rejected]
    return {name for name in [columns.system, columns.tools, *own] if name is not None}


def _require_columns(entry: DatasetEntry, file: Path, found: set[str]) -> None:
    """Refuse a file without the columns that carry the conversation, and list those that it has."""
    columns = entry.columns
    required: dict[str, tuple[str | None, ...]] = {"messages": (columns.messages,)}
    if entry.formatting == "alpaca":
        required = {"response": (columns.response,), "prompt": (columns.prompt, columns.query)}
    if entry.ranking:
        required.pop("response", None)
        required |= {"chosen": (columns.chosen,), "rejected": (columns.rejected,)}
    for key, names in required.items():
        if found.intersection(name for name in names if name is not None):
            continue
        found = set(columns_of(file) or found)  # of some types only the wanted columns were read
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
    found = columns_of(file)
    for key in _OPTIONAL:
        held = key in found if found is not None else any(row.data.get(key) for row in window)
        if held and getattr(entry.columns, key) is None and key not in (entry.named_columns or ()):
            _log.warning(
                "dataset %s: the rows have a column %r that no key of the entry names, so it is not used; "
                "write "
                "columns: {%s: %s} to use it, or {%s: null} to say so",
                *(entry.name, key, key, key, key),
            )


def _copies(entry: DatasetEntry) -> np.ndarray:
    """How often each row is taken, int64 [N]; sums to ``num_samples`` unless there are no rows."""
    import numpy as np  # here: looking at entries alone is to be quick

    num_rows, num_samples = count_entry_rows(entry), entry.num_samples or 0
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64)
    copies = np.full(num_rows, num_samples // num_rows, dtype=np.int64)
    drawn = np.random.default_rng(NUM_SAMPLES_SEED).permutation(num_rows)[: num_samples % num_rows]
    copies[drawn] += 1
    return copies
