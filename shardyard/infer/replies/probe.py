"""A template's way to write thoughts and calls, found by letting it write some.

One call, two calls, calls of no, one and two arguments are rendered, and what is the same and what changes
between the texts gives the pieces of `CallFormat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import common_prefix
from shardyard.data.templates.render import Renderer
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.infer.replies.format import HERMES, CallFormat, ReplyFormat

_WORDS = "Probe words."
_THOUGHT = "probe thought"
_FIRST, _SECOND = "probe_name", "probe_other"
_ONE = {"probe_key": "probe_value"}
_TWO = {**_ONE, "probe_more": "probe_last"}
_QUESTION = Message("user", "Question?")
_MARKUP = re.compile(r"<[^<>\s]+>$")
_OPEN_MARK = re.compile(r"<[^<>\s]*$")


def find_reply_format(renderer: Renderer) -> ReplyFormat:
    """How ``renderer``'s template writes replies."""
    thought = _thought(renderer) or ReplyFormat().thought
    return ReplyFormat(_calls(renderer, thought), thought)


def _thought(renderer: Renderer) -> tuple[str, str] | None:
    try:
        text = renderer.render(Conversation((_QUESTION, Message("assistant", _WORDS, reasoning=_THOUGHT))), 2)
    except NotUsable:
        return None
    before, found, behind = text.partition(_THOUGHT)
    between, has_words, _ = behind.partition(_WORDS)
    opened = _MARKUP.search(before.rstrip())
    if not (found and has_words and opened and between.strip().startswith("<")):
        return None
    return opened[0], between.strip()


def _calls(renderer: Renderer, thought: tuple[str, str]) -> CallFormat | None:
    probes = _Probes(renderer, thought)
    try:
        before, behind = probes.around(_FIRST, _ONE)
    except _Unclear:
        return HERMES if renderer._writes_tools else None  # pyright: ignore[reportPrivateUsage]
    joint = before[: len(before) - len(before.lstrip())] if probes.with_words else ""
    brace = before.rfind("{")
    if brace >= 0 and (end := _object_end(before[brace:] + _FIRST + behind)) is not None:
        opened, closed = before[:brace], behind[end - len(before[brace:] + _FIRST) :]
        form = _framed(CallFormat("json", joint=joint), opened, closed, probes.between(_json_gap))
        if form.lead.endswith("[") and form.tail.startswith("]"):  # a list of calls is one JSON value
            lead, tail = form.lead[:-1].strip(), form.tail[1:].strip()
            form = replace(form, lead="", open=lead, close=tail, tail="")
    elif (place := _json_place(behind)) is not None:
        start, end = place
        form = CallFormat("named", middle=behind[:start].strip(), joint=joint)
        form = _framed(form, before, behind[end:], probes.between(_named_gap))
    else:
        form = _fields(probes, before, behind, joint)
    return form


class _Unclear(Exception):
    """The template does not write such a call, or not so that it can be found."""


class _Probes:
    """The template's texts of calls. ``with_words``: they are written behind words, so that these can be
    told from what belongs to the calls."""

    def __init__(self, renderer: Renderer, thought: tuple[str, str]) -> None:
        self._renderer, self._thought = renderer, thought
        self._ending = _reply(renderer, Message("assistant", _WORDS)).rpartition(_WORDS)[2]
        self.with_words = True
        self.with_words = _FIRST in self._text([ToolCall(_FIRST, _ONE)])

    def _text(self, calls: Iterable[ToolCall]) -> str:
        """From behind the words, or the thought, to before the reply's end."""
        content = _WORDS if self.with_words else ""
        text = _reply(self._renderer, Message("assistant", content, tool_calls=tuple(calls)))
        text = text.partition(_WORDS)[2] if self.with_words else text.rpartition(self._thought[1])[2]
        return text.removesuffix(self._ending) if self._ending else text

    def around(self, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
        """What stands before and behind the name of one call."""
        before, found, behind = self._text([ToolCall(name, arguments)]).partition(name)
        if not found:
            raise _Unclear
        return before, behind

    def between(self, gap: Any) -> str | None:
        """What stands between two calls, by ``gap``; None where the template writes one only."""
        text = self._text([ToolCall(_FIRST, _ONE), ToolCall(_SECOND, _ONE)])
        return gap(text) if _FIRST in text and _SECOND in text else None


def _framed(form: CallFormat, opened: str, closed: str, gap: str | None) -> CallFormat:
    """The pieces around a call, from what stands before and behind one and between two."""
    if gap is None:
        return replace(form, open=opened.strip(), close=closed.strip())
    each = _common_suffix(opened, gap)
    end = common_prefix(closed, gap[: len(gap) - len(each)])
    return replace(
        form, lead=opened[: len(opened) - len(each)].strip(), open=each.strip(), close=end.strip(),
        tail=closed[len(end) :].strip(),
    )  # fmt: skip


def _json_gap(text: str) -> str | None:
    """From the end of the first call's object to the beginning of the second's."""
    brace = text.rfind("{", 0, text.find(_FIRST))
    end = _object_end(text[brace:])
    second = text.rfind("{", 0, text.find(_SECOND))
    return text[brace + end : second] if end is not None and second >= brace + end else None


def _named_gap(text: str) -> str | None:
    second = text.find(_SECOND)
    start = text.find(_FIRST)
    place = _json_place(text[start:second])
    return text[start + place[1] : second] if place else None


def _fields(probes: _Probes, before: str, behind: str, joint: str) -> CallFormat | None:
    key, value = "probe_key", "probe_value"
    try:
        head, found_key, rest = behind.partition(key)
        value_open, found_value, end_one = rest.partition(value)
        _, more = probes.around(_FIRST, _TWO)
    except _Unclear:
        return None
    if not (found_key and found_value):
        return None
    gap = more.partition(value)[2].partition("probe_more")[0]
    key_open = _common_suffix(head, gap)
    value_close = gap[: len(gap) - len(key_open)]
    if not end_one.startswith(value_close) or not value_close.strip() or not key_open.strip():
        return None
    form = CallFormat(
        "fields", middle=head[: len(head) - len(key_open)].strip(), key_open=key_open.strip(),
        value_open=value_open.strip(), value_close=value_close.strip(), joint=joint,
        pads=(_white_end(value_open), value_close[: len(value_close) - len(value_close.lstrip())]),
    )  # fmt: skip

    def call_gap(text: str) -> str:
        return text[text.find(value) + len(value) + len(value_close) : text.find(_SECOND)]

    return _framed(form, before, end_one[len(value_close) :], probes.between(call_gap))


def _reply(renderer: Renderer, turn: Message) -> str:
    """The text of a reply, from behind the prompt or the header of replies; "" where it is refused."""
    try:
        text, plain, other = (
            renderer.render(Conversation((_QUESTION, one)), 2)
            for one in (turn, Message("assistant", "Aye"), Message("assistant", "Nay"))
        )
        prompt = renderer.render(Conversation((_QUESTION,)), 1, generation_prompt=True)
    except NotUsable:
        return ""
    header = common_prefix(plain, other)
    for begin in (prompt, header):
        if text.startswith(begin):
            return text[len(begin) :]
    # a mark that both only begin alike (<think>, <tool_call>) is shared by neither
    return text[len(_OPEN_MARK.sub("", common_prefix(text, header))) :]


def _object_end(text: str) -> int | None:
    """Where the JSON object ends that ``text`` begins with."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return end if isinstance(value, dict) else None


def _json_place(text: str) -> tuple[int, int] | None:
    """Where the arguments of one key stand as JSON."""
    start = text.find("{")
    while start >= 0:
        end = _object_end(text[start:])
        if end is not None and json.loads(text[start : start + end]) == _ONE:
            return start, start + end
        start = text.find("{", start + 1)
    return None


def _common_suffix(first: str, second: str) -> str:
    return common_prefix(first[::-1], second[::-1])[::-1]


def _white_end(text: str) -> str:
    return text[len(text.rstrip()) :]
