"""Rows -> conversations, for the formats alpaca, sharegpt and openai.

Null, a missing column and an empty text mean the same: nothing. What becomes of a row's shape:

- kept: user, assistant, user, assistant ...; a system message in front; tool results (one or several in a
  row) in the place of a user turn, after an assistant turn;
- dropped, with a reason that the report counts: no turns; beginning with the assistant or a tool result; two
  user turns or two assistant turns in a row; ending without a reply; a system message further down; an empty
  prompt or reply; an unknown role; a part that is not text; tools or calls that are not valid JSON.

Nothing is merged or cut to make a row fit: the trained text is always what the row says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from shardyard.data.dropped import Dropped, NotUsable
from shardyard.data.sources import Columns, DatasetEntry, Row, Tags
from shardyard.data.types import Conversation, Message, ToolCall

__all__ = ["Dropped", "convert"]


def convert(row: Row, entry: DatasetEntry) -> Conversation | Dropped:
    """The conversation of a row, or why there is none. It ends with an assistant turn."""
    try:
        turns, system = _CONVERTERS[entry.formatting](row.data, entry)
        if not system:
            system = _text(_column(row.data, entry.columns.system), "system")
        tools = _tools(_column(row.data, entry.columns.tools))
        _check_shape(turns)
    except NotUsable as error:
        return Dropped(str(error), row.where)
    return Conversation(tuple(turns), system or None, tools, row.where)


def _alpaca(data: dict[str, Any], entry: DatasetEntry) -> tuple[list[Message], str]:
    columns = entry.columns
    prompt = "\n".join(
        part
        for key, name in (("prompt", columns.prompt), ("query", columns.query))
        if (part := _text(_column(data, name), key))
    )
    response = _text(_column(data, columns.response), "response")
    turns = [
        *_history(_column(data, columns.history)),
        Message("user", prompt),
        Message("assistant", response),
    ]
    return turns, ""


def _history(value: Any) -> list[Message]:
    """Earlier turns, given as pairs of a question and its answer."""
    turns: list[Message] = []
    if value is None:
        return turns
    if not isinstance(value, list):
        raise NotUsable("history is not a list of pairs")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise NotUsable("history is not a list of pairs")
        turns += [Message("user", _text(pair[0], "history")), Message("assistant", _text(pair[1], "history"))]
    return turns


def _sharegpt(data: dict[str, Any], entry: DatasetEntry) -> tuple[list[Message], str]:
    tags = entry.tags
    turns: list[Message] = []
    system = ""
    for position, turn in enumerate(_turn_list(data, entry.columns)):
        role = turn.get(tags.role_tag)
        text = _text(turn.get(tags.content_tag), "turn")
        if role == tags.system_tag:
            system = _leading_system(text, position)
        elif role == tags.user_tag:
            turns.append(Message("user", text))
        elif role == tags.assistant_tag:
            turns.append(Message("assistant", text))
        elif role == tags.observation_tag:
            turns.append(Message("tool", text))
        elif role == tags.function_tag:
            turns.append(Message("assistant", "", tool_calls=_calls_of_text(text)))
        else:
            raise _unknown_role(role, tags)
    return turns, system


def _openai(data: dict[str, Any], entry: DatasetEntry) -> tuple[list[Message], str]:
    """OpenAI's chat messages. Its own role names are understood beside those that ``tags`` give."""
    tags = entry.tags
    turns: list[Message] = []
    system = ""
    for position, turn in enumerate(_turn_list(data, entry.columns)):
        role = turn.get(tags.role_tag)
        text = _text(turn.get(tags.content_tag), "turn")
        if role in (tags.system_tag, "system", "developer"):
            system = _leading_system(text, position)
        elif role in (tags.user_tag, "user"):
            turns.append(Message("user", text))
        elif role in (tags.assistant_tag, "assistant"):
            reasoning = _text(turn.get("reasoning_content"), "reasoning_content") or None
            turns.append(Message("assistant", text, reasoning, _calls_of_turn(turn)))
        elif role in (tags.observation_tag, "tool", "function"):
            turns.append(Message("tool", text))
        elif role == tags.function_tag:
            turns.append(Message("assistant", "", tool_calls=_calls_of_text(text)))
        else:
            raise _unknown_role(role, tags)
    return turns, system


_CONVERTERS: dict[str, Callable[[dict[str, Any], DatasetEntry], tuple[list[Message], str]]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "openai": _openai,
}


def _column(data: dict[str, Any], name: str | None) -> Any:
    return None if name is None else data.get(name)


def _text(value: Any, what: str) -> str:
    """A text, or the text parts of a list of parts (OpenAI's content); null is the empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise NotUsable(f"{what} is not text but {type(value).__name__}")
    parts: list[str] = []
    for part in value:
        if (
            isinstance(part, dict)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
        ):
            parts.append(part["text"])
        elif isinstance(part, str):
            parts.append(part)
        else:
            raise NotUsable(f"{what} holds a part that is not text")
    return "".join(parts)


def _turn_list(data: dict[str, Any], columns: Columns) -> list[dict[str, Any]]:
    turns = _column(data, columns.messages)
    if turns is None or turns == []:
        raise NotUsable("no turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise NotUsable("turns are not a list of objects")
    return turns


def _leading_system(text: str, position: int) -> str:
    if position > 0:
        raise NotUsable("a system message after the first turn")
    return text


def _unknown_role(role: Any, tags: Tags) -> NotUsable:
    if role is None:
        return NotUsable(f"a turn without {tags.role_tag!r}")
    return NotUsable(f"unknown role {str(role)[:40]!r}")


def _calls_of_text(text: str) -> tuple[ToolCall, ...]:
    """The calls of a function turn: JSON text of one call or of a list of them."""
    value = _parse(text, "function call")
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise NotUsable("function call without a call")
    return tuple(_call(call) for call in calls)


def _calls_of_turn(turn: dict[str, Any]) -> tuple[ToolCall, ...]:
    """An assistant message's ``tool_calls`` (a list or its JSON text), or its older ``function_call``."""
    calls = turn.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _parse(calls, "tool_calls")
    if not isinstance(calls, list):
        raise NotUsable("tool_calls is not a list")
    if not calls and turn.get("function_call"):
        calls = [turn["function_call"]]
    return tuple(_call(call) for call in calls)


def _call(value: Any) -> ToolCall:
    """``{"name", "arguments"}``, bare or under ``function``; arguments as a value or as JSON text."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise NotUsable("function call without a name")
    arguments = value.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parse(arguments, "function call's arguments")
    return ToolCall(value["name"], {} if arguments in (None, "") else arguments)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools column: a list of objects, or its JSON text; empty means no tools."""
    if isinstance(value, str):
        value = _parse(value, "tools") if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise NotUsable("tools is not a list of objects")
    return tuple(value)


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotUsable(f"{what} is not valid JSON") from None


def _check_shape(turns: Sequence[Message]) -> None:
    """Raise NotUsable unless the turns have the shape that the module's docstring calls kept."""
    if not turns:
        raise NotUsable("no turns")
    if turns[0].role != "user":
        raise NotUsable(
            "begins with the assistant" if turns[0].role == "assistant" else "begins with a tool result"
        )
    for before, turn in pairwise(turns):
        if turn.role == "assistant" and before.role == "assistant":
            raise NotUsable("two assistant turns in a row")
        if turn.role == "user" and before.role == "user":
            raise NotUsable("two user turns in a row")
        if {turn.role, before.role} == {"user", "tool"}:
            raise NotUsable("a user turn beside a tool result")
    if turns[-1].role != "assistant":
        raise NotUsable("ends without a reply")
    for turn in turns:
        if turn.role == "user" and not turn.content.strip():
            raise NotUsable("empty prompt")
        if turn.role == "assistant" and not (turn.content.strip() or turn.tool_calls):
            raise NotUsable("empty reply")
