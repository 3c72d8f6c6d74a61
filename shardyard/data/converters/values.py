"""The values inside a row: texts, JSON, flags. Null, a missing key and an empty text all mean nothing."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from shardyard.data.dropped import NotUsable

MAX_DEPTH = 64
"""How deep tools and arguments may nest: far more than any has, far less than Python's stack."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Where a turn may hold its thought, first found wins: the names that transformers knows, in its order."""


def text_of(value: Any, what: str) -> str:
    """A text, or the text parts of a list of parts (OpenAI's content); null is the empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise NotUsable(f"{what} is not text but {type(value).__name__}")
    parts: list[str] = []
    for part in value:
        if isinstance(part, dict) and part.get("type") in (None, "text"):
            part = part.get("text")
        if not isinstance(part, str):
            raise NotUsable(f"{what} holds a part that is not text")
        parts.append(part)
    return "".join(parts)


def reasoning_of(turn: dict[str, Any]) -> str | None:
    """The thought that a turn holds apart from its content."""
    found = ((name, turn[name]) for name in _REASONING if turn.get(name) not in (None, "", []))
    name, value = next(found, ("", None))
    return text_of(value, name) or None


def is_trained(turn: dict[str, Any]) -> bool:
    """Whether a reply is trained: neither its ``weight`` is 0 nor its ``train`` false.

    Raises:
        NotUsable: a weight other than 0 and 1 (replies are trained or not, nothing between), or a ``train``
            that is not true or false.
    """
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and not (isinstance(weight, int | float) and weight in (0, 1)):
        raise NotUsable("weight must be 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise NotUsable("train must be true or false")
    return weight != 0 and train is not False


def given_or_parsed(value: Any, what: str) -> Any:
    """The value of a column that may be given as JSON text, as csv files and many parquet files do."""
    if not isinstance(value, str):
        return value
    return parse(value, what) if value.strip() else None


def parse(text: str, what: str) -> Any:
    """The value of JSON text. Raises NotUsable if it is none."""
    try:
        return json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        raise NotUsable(f"{what} is not valid JSON") from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def check_json(value: Any, what: str, room: int = MAX_DEPTH) -> None:
    """Raise NotUsable unless ``value`` can be written as JSON: parquet knows more types, Python NaN."""
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotUsable(f"{what} holds a number that JSON has not ({value})")
        return
    if not isinstance(value, list | dict):
        raise NotUsable(f"{what} holds a value that JSON has not ({type(value).__name__})")
    if room <= 0:
        raise NotUsable(f"{what} nests more than {MAX_DEPTH} deep")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise NotUsable(f"{what} holds a key that is not text")
    for part in value.values() if isinstance(value, dict) else value:
        check_json(part, what, room - 1)
