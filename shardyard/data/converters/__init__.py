"""Rows -> conversations, for the formats alpaca, sharegpt and openai, and preference pairs of all three.

Null, a missing column and an empty text mean the same: nothing. Turns, history, tools and calls may be given
as JSON text. What becomes of a row's shape:

- kept: user, assistant, user, assistant ...; a system message in front; tool results (one or several in a
  row) in the place of a user turn, after an assistant turn, brought into the order of the calls by their ids;
- dropped, with a reason that the report counts: no turns; beginning with the assistant or a tool result; two
  user turns or two assistant turns in a row; ending without a reply; a system message further down; an empty
  prompt or reply; an unknown role; a part that is not text; tools or calls that are not valid JSON; results
  whose ids match no call.

Nothing is merged or cut to make a row fit: the trained text is always what the row says.

A reply with ``weight: 0`` or ``train: false`` is context only; a row without another reply is dropped. On
other turns both keys mean nothing: prompts are trained by ``data.train_on_prompt``. A thought may stand
inside the reply's text, or apart as ``reasoning_content``, ``thinking`` or ``reasoning``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shardyard.data.converters.tools import tools_of
from shardyard.data.converters.turns import alpaca_prompt, chat_turns, column, turn_list
from shardyard.data.converters.values import parse, text_of
from shardyard.data.dropped import Dropped, NotUsable
from shardyard.data.sources import DatasetEntry, Row
from shardyard.data.types import Conversation, Message, PreferencePair

__all__ = ["Dropped", "convert", "convert_pair"]


def convert(row: Row, entry: DatasetEntry) -> Conversation | Dropped:
    """The conversation of a row, or why there is none. It ends with an assistant turn."""
    try:
        turns, system = _turns(row.data, entry)
        system = system or text_of(column(row.data, entry.columns.system), "system")
        tools = tools_of(column(row.data, entry.columns.tools))
        _check_shape(turns)
        _check_trained(turns)
    except NotUsable as error:
        return Dropped(str(error), row.where)
    return Conversation(tuple(turns), system or None, tools, row.where)


def convert_pair(row: Row, entry: DatasetEntry) -> PreferencePair | Dropped:
    """The preference pair of a row of a ranking entry, or why there is none.

    The prompt is an Alpaca row's prompt and history, or all turns of a ShareGPT or OpenAI row. The columns
    ``chosen`` and ``rejected`` hold a text, or a message as the format writes it.
    """
    columns = entry.columns
    try:
        prompt, system = _prompt(row.data, entry)
        system = system or text_of(column(row.data, columns.system), "system")
        tools = tools_of(column(row.data, columns.tools))
        chosen = _reply(column(row.data, columns.chosen), entry, "chosen")
        rejected = _reply(column(row.data, columns.rejected), entry, "rejected")
        if prompt and prompt[-1].role == "assistant":
            raise NotUsable("the prompt ends with a reply")
        _check_shape([*prompt, chosen])
        if chosen == rejected:
            raise NotUsable("chosen and rejected are the same")
    except NotUsable as error:
        return Dropped(str(error), row.where)
    return PreferencePair(tuple(prompt), chosen, rejected, system or None, tools, row.where)


def _turns(data: dict[str, Any], entry: DatasetEntry) -> tuple[list[Message], str]:
    if entry.formatting != "alpaca":
        return chat_turns(turn_list(data, entry.columns), entry)
    response = text_of(column(data, entry.columns.response), "response")
    return [*alpaca_prompt(data, entry.columns), Message("assistant", response)], ""


def _prompt(data: dict[str, Any], entry: DatasetEntry) -> tuple[list[Message], str]:
    if entry.formatting != "alpaca":
        return chat_turns(turn_list(data, entry.columns), entry)
    return alpaca_prompt(data, entry.columns), ""


def _reply(value: Any, entry: DatasetEntry, what: str) -> Message:
    """A reply given as text, as a message, as a list of one message, or as the JSON text of a message."""
    if isinstance(value, str) and entry.formatting != "alpaca" and value.lstrip().startswith(("{", "[")):
        value = _message_in(value, entry) or value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict) and entry.formatting != "alpaca":
        turns, system = chat_turns([value], entry)
        if system or len(turns) != 1 or turns[0].role != "assistant":
            raise NotUsable(f"{what} is not a reply of the assistant")
        reply = turns[0]
    else:
        reply = Message("assistant", text_of(value, what))
    if _is_empty(reply):
        raise NotUsable(f"{what} is empty")
    if not reply.train:
        raise NotUsable(f"{what} is not to be trained (weight: 0 or train: false)")
    return reply


def _message_in(text: str, entry: DatasetEntry) -> dict[str, Any] | None:
    """The message whose JSON text this is; a reply may well be JSON of another kind."""
    try:
        value = parse(text, "message")
    except NotUsable:
        return None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) and entry.tags.role_tag in value else None


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
        if turn.role == "assistant" and _is_empty(turn):
            raise NotUsable("empty reply")


def _is_empty(reply: Message) -> bool:
    return not (reply.content.strip() or reply.tool_calls)


def _check_trained(turns: Sequence[Message]) -> None:
    if not any(turn.train for turn in turns if turn.role == "assistant"):
        raise NotUsable("no reply is to be trained (weight: 0 or train: false on all of them)")
