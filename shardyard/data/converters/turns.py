"""The turns of a row, by format; their order is checked by ``convert``."""

from __future__ import annotations

from typing import Any

from shardyard.data.converters.tools import (
    call_id,
    calls_of_content,
    calls_of_turn,
    in_call_order,
    tool_call,
)
from shardyard.data.converters.values import given_or_parsed, is_trained, reasoning_of, text_of
from shardyard.data.dropped import NotUsable
from shardyard.data.sources import Columns, DatasetEntry, Tags
from shardyard.data.types import Message

_OPENAI_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Understood in OpenAI rows beside the names that ``tags`` give."""


def column(data: dict[str, Any], name: str | None) -> Any:
    """The value of a column; None if this dataset, or this row, has no such column."""
    return None if name is None else data.get(name)


def alpaca_prompt(data: dict[str, Any], columns: Columns) -> list[Message]:
    """The earlier turns and the prompt of an Alpaca row: prompt and query joined by a line end."""
    parts = [
        text_of(column(data, columns.prompt), "prompt"),
        text_of(column(data, columns.query), "query"),
    ]
    return [
        *_history(column(data, columns.history)),
        Message("user", "\n".join(part for part in parts if part)),
    ]


def _history(value: Any) -> list[Message]:
    """Earlier turns, given as pairs of a question and its answer, or as their JSON text."""
    turns: list[Message] = []
    pairs = given_or_parsed(value, "history")
    if pairs is None:
        return turns
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise NotUsable("history is not a list of pairs")
    for question, answer in pairs:
        turns += [
            Message("user", text_of(question, "history")),
            Message("assistant", text_of(answer, "history")),
        ]
    return turns


def turn_list(data: dict[str, Any], columns: Columns) -> list[dict[str, Any]]:
    """The column of the turns: a list of objects, or its JSON text."""
    turns = given_or_parsed(column(data, columns.messages), "the list of turns")
    if turns is None or turns == []:
        raise NotUsable("no turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise NotUsable("turns are not a list of objects")
    return turns


def chat_turns(turns: list[dict[str, Any]], entry: DatasetEntry) -> tuple[list[Message], str]:
    """The turns of a ShareGPT or OpenAI row without the system message, and that message."""
    roles = _roles(entry)
    messages: list[Message] = []
    ids: list[tuple[str | None, ...]] = []
    system = ""
    for position, turn in enumerate(turns):
        kind = _kind(turn.get(entry.tags.role_tag), roles, entry.tags)
        if kind == "system":
            if position > 0:
                raise NotUsable("a system message after the first turn")
            system = text_of(turn.get(entry.tags.content_tag), "turn")
            continue
        message, message_ids = _message(turn, kind, entry.tags)
        messages.append(message)
        ids.append(message_ids)
    return in_call_order(messages, ids), system


def _roles(entry: DatasetEntry) -> dict[str, str]:
    tags = entry.tags
    named = {
        tags.function_tag: "calls",
        tags.observation_tag: "tool",
        tags.assistant_tag: "assistant",
        tags.user_tag: "user",
        tags.system_tag: "system",
    }
    return {**_OPENAI_ROLES, **named} if entry.formatting == "openai" else named


def _kind(role: Any, roles: dict[str, str], tags: Tags) -> str:
    if isinstance(role, str) and role in roles:
        return roles[role]
    if role is None:
        raise NotUsable(f"a turn without {tags.role_tag!r}")
    if not isinstance(role, str):
        raise NotUsable(f"{tags.role_tag!r} is not text but {type(role).__name__}")
    raise NotUsable(f"unknown role {role[:40]!r}")


def _message(turn: dict[str, Any], kind: str, tags: Tags) -> tuple[Message, tuple[str | None, ...]]:
    """A turn, and the ids of its calls or of the call that it answers."""
    content = turn.get(tags.content_tag)
    if kind == "user":
        return Message("user", text_of(content, "turn")), ()
    if kind == "tool":
        return Message("tool", text_of(content, "turn")), (call_id(turn.get("tool_call_id")),)
    if kind == "calls":
        text, calls = "", calls_of_content(content)
    else:
        text, calls = text_of(content, "turn"), calls_of_turn(turn)
    reply = Message("assistant", text, reasoning_of(turn), tuple(map(tool_call, calls)), is_trained(turn))
    return reply, tuple(call_id(call.get("id")) for call in calls)
