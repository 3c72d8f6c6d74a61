"""A dataset entry: which files, in which format, and what their columns and role tags are called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from shardyard.data.sources.files import file_type
from shardyard.errors import UserError

FORMATS = ("alpaca", "sharegpt", "openai")

NAMED = TypeVar("NAMED", "Columns", "Tags")


@dataclass(frozen=True)
class Columns:
    """The column that holds each part of a row; None: this dataset has no such part.

    The first four belong to Alpaca rows, ``messages`` to ShareGPT and OpenAI rows, ``chosen`` and
    ``rejected`` to preference pairs; ``text`` is the column of a pretraining document.
    """

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    messages: str | None = "conversations"
    system: str | None = None
    tools: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = "text"


@dataclass(frozen=True)
class Tags:
    """How a ShareGPT or OpenAI turn names its role and its content, and how it calls each role."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


OPENAI_COLUMNS = Columns(messages="messages", tools="tools")
OPENAI_TAGS = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset, resolved: ``files`` exist, are of one type and stand in the order in which they are read.

    ``num_samples`` rows are taken (None: all), see ``rows.iter_rows``. ``named_columns`` are the keys that
    the user wrote under ``columns`` (None: wrote no ``columns`` at all). ``ranking``: its rows are preference
    pairs, a prompt with a chosen and a rejected reply.
    """

    name: str
    files: tuple[Path, ...]
    formatting: str = "alpaca"
    columns: Columns = Columns()
    tags: Tags = Tags()
    num_samples: int | None = None
    named_columns: tuple[str, ...] | None = None
    ranking: bool = False

    @property
    def suffix(self) -> str:
        """The type of its files, one of ``files.TYPES``: that of ``a.jsonl.gz`` is ``.jsonl``."""
        return file_type(self.files[0])


def named(defaults: NAMED, given: Any, what: str, ignored: Iterable[str] = ()) -> NAMED:
    """``defaults`` with what the user named; a key that is not named keeps its default.

    ``what`` says where the mapping stands, for messages. Keys of ``ignored`` are legal and mean nothing here.

    Raises:
        UserError: not a mapping of names to names, or a key that does not exist.
    """
    if given is None:
        return defaults
    if not isinstance(given, Mapping):
        raise UserError(f"{what}: must be a mapping of names, found {type(given).__name__}")
    known = [field.name for field in fields(defaults)]
    values = {key: value for key, value in given.items() if key not in ignored}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{what}: unknown key {key!r}{suggestion(str(key), known)}")
        optional = isinstance(defaults, Columns)
        if not (isinstance(value, str) and value) and not (optional and value is None):
            wanted = "the name of a column, or null" if optional else "a text"
            raise UserError(f"{what}.{key}: must be {wanted}, found {value!r}")
    merged = {name: getattr(defaults, name) for name in known} | values
    return type(defaults)(**merged)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` if a known name is near, else the known names."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(names)}" if names else ""
