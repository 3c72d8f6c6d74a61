"""The text of calls -> `ToolCall`s, by a `CallFormat`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from shardyard.data.types import ToolCall
from shardyard.infer.replies.cursor import Cursor, NotSo, parsed
from shardyard.infer.replies.format import CallFormat

_ARGUMENTS = ("arguments", "parameters")
_NOT_IN_NAMES = frozenset("<>{}[]()\"'` \t\r\n")
_LONGEST_NAME = 256

Types = Mapping[str, Mapping[str, Any]]
"""Tool -> parameter -> its schema."""


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """The schemas of the tools' parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found[str(function.get("name"))] = properties if isinstance(properties, Mapping) else {}
    return found


def read_call(cursor: Cursor, form: CallFormat, types: Types) -> Generator[None, None, list[ToolCall]]:
    """The call that begins at the cursor, or the list of calls.

    Raises NotSo if there is none; the cursor stands anywhere then.
    """
    if form.lead:
        yield from cursor.is_next(form.lead)
    yield from cursor.expect(form.open)
    if form.kind == "json":
        value = yield from cursor.json()
        calls = [call_of(one) for one in (value if isinstance(value, list) else [value])]
    elif form.kind == "named":
        name = yield from _name(cursor, form.middle)
        yield from cursor.expect(form.middle)
        calls = [call_of({"name": name, "arguments": (yield from cursor.json())})]
    else:
        calls = [(yield from _by_fields(cursor, form, types))]
    yield from cursor.expect(form.close)
    if not calls:
        raise NotSo
    return calls


def _name(cursor: Cursor, *ends: str) -> Generator[None, None, str]:
    """The name up to white space, or one of ``ends``, which is not read."""
    yield from cursor.space()
    start = place = cursor.place
    firsts = [end.split()[0] for end in ends if end]
    while True:
        while place < len(cursor.text):
            if cursor.text[place] in _NOT_IN_NAMES or any(
                cursor.text.startswith(end, place) for end in firsts
            ):
                if place == start:
                    raise NotSo
                cursor.place = place
                return cursor.text[start:place]
            place += 1
            if place - start > _LONGEST_NAME:
                raise NotSo
        yield from cursor.more()
        place = max(start, place - max(map(len, firsts), default=0))


def _by_fields(cursor: Cursor, form: CallFormat, types: Types) -> Generator[None, None, ToolCall]:
    name = yield from _name(cursor, form.middle, form.key_open, form.close)
    yield from cursor.expect(form.middle)
    arguments: dict[str, Any] = {}
    first, *others = form.value_open.split()
    while (yield from cursor.is_next(form.key_open)):
        key = (yield from cursor.until(first)).strip()
        for part in others:
            yield from cursor.expect(part)
        value = yield from cursor.until(form.value_close)
        if not key or key in arguments:
            raise NotSo
        arguments[key] = _value(value, form.pads, types.get(name, {}).get(key))
    return ToolCall(name, arguments)


def _value(text: str, pads: tuple[str, str], schema: Any) -> Any:
    """A written argument: text where its schema says so, else JSON if it is any."""
    text = text.removeprefix(pads[0]).removesuffix(pads[1])
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return parsed(text)
    except NotSo:
        return text


def call_of(value: Any) -> ToolCall:
    """The call of a JSON object. Raises NotSo if it is none."""
    if not isinstance(value, dict):
        raise NotSo
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise NotSo
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = parsed(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise NotSo
    return ToolCall(name, arguments)
