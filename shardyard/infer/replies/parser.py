"""A reply's text, whole or as it comes -> its thought, its words and its calls.

What is no thought and no call that can be read is content, letter for letter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.data.types import ToolCall
from shardyard.infer.replies.calls import read_call, types_of
from shardyard.infer.replies.cursor import Cursor, NotSo, Reading
from shardyard.infer.replies.format import CallFormat, ReplyFormat
from shardyard.infer.text import begun

_MOST_FAULTS = 32
"""After so many beginnings of calls that were none, the rest of a reply is content: work stays linear."""


@dataclass(frozen=True)
class Delta:
    """What is new: a piece of the thought, of the words, or a whole call."""

    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True)
class Reply:
    """``reasoning`` is None where the reply has no thought."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(
    text: str,
    form: ReplyFormat,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    in_thought: bool = False,
    reads_calls: bool = True,
) -> Reply:
    """The parts of a whole reply; see `ReplyParser`."""
    parser = ReplyParser(form, tools=tools, in_thought=in_thought, reads_calls=reads_calls)
    return joined([*parser.feed(text), *parser.flush()])


def joined(deltas: Sequence[Delta]) -> Reply:
    """The reply of all its deltas."""
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = tuple(delta.call for delta in deltas if delta.call is not None)
    return Reply(reasoning or None, "".join(delta.content for delta in deltas), calls)


class ReplyParser:
    """``feed`` takes text as it comes and gives what is certain by it; ``flush`` the rest, once.

    ``in_thought``: the prompt has opened the thought (`Prompt.in_thought`). ``tools`` are those of the
    request: where arguments are written without their types the schemas tell them, and where calls have no
    marks a call is one of a tool. ``reads_calls``: False leaves calls in the content.

    Whatever the pieces are, the deltas join to the same reply. Nothing here raises for any text.
    """

    def __init__(
        self,
        form: ReplyFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        in_thought: bool = False,
        reads_calls: bool = True,
    ) -> None:
        self._form = form
        self._calls = form.calls if reads_calls else None
        self._types = types_of(tools)
        self._cursor = Cursor()
        self._new: list[Delta] = []
        self._space = ""
        self._has_content = self._has_calls = False
        self._reading: Reading | None = self._reply(in_thought)

    def feed(self, text: str) -> list[Delta]:
        """The new deltas."""
        if text:
            self._cursor.text += text
            self._go_on()
        new, self._new = self._new, []
        return new

    def flush(self) -> list[Delta]:
        """The last deltas: there is no more text."""
        self._cursor.ended = True
        self._go_on()
        new, self._new = self._new, []
        return new

    def _go_on(self) -> None:
        if self._reading is None:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._reading = None

    def _reply(self, in_thought: bool) -> Reading:
        opened, closed = self._form.thought
        cursor = self._cursor
        start = yield from self._begin()
        if (yield from cursor.is_next(opened)) or in_thought:
            yield from self._thought(closed)
        else:
            cursor.place = start
        if self._calls is not None and not self._calls.marks:
            yield from self._bare_calls(self._calls)
            yield from self._words(None)
        else:
            yield from self._words(self._calls)
        if self._space and not self._has_calls:
            self._new.append(Delta(content=self._space))

    def _begin(self) -> Generator[None, None, int]:
        """Wait for the first text; where the reply begins."""
        while not self._cursor.text and not self._cursor.ended:
            yield
        return self._cursor.place

    def _thought(self, closed: str) -> Reading:
        """Up to ``closed``, without the line ends around it."""
        cursor, held, is_first = self._cursor, "", True
        cursor.forget()
        while True:
            text = held + cursor.take()
            before, found, behind = text.partition(closed)
            if is_first:
                before = before.lstrip("\n")
            kept = 0 if found else begun(before, [closed])
            said = before[: len(before) - kept]
            shown = said.rstrip("\n")
            if shown:
                is_first = False
                self._new.append(Delta(reasoning=shown))
            if found:
                cursor.text, cursor.place = behind, 0
                yield from self._line_ends()
                return
            held = before[len(shown) :]
            if cursor.ended:
                if held:
                    self._new.append(Delta(reasoning=held))
                return
            yield

    def _line_ends(self) -> Reading:
        """Skip those behind a thought."""
        cursor = self._cursor
        while True:
            cursor.text, cursor.place = cursor.text[cursor.place :].lstrip("\n"), 0
            if cursor.text or cursor.ended:
                return
            yield

    def _words(self, calls: CallFormat | None) -> Reading:
        """Content with calls in it, to the end."""
        cursor, faults = self._cursor, 0
        while True:
            marks = calls.marks if calls is not None and faults < _MOST_FAULTS else ()
            text = cursor.text[cursor.place :]
            places = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
            if not places:
                kept = 0 if cursor.ended else begun(text, marks)
                self._say(text[: len(text) - kept])
                cursor.place += len(text) - kept
                cursor.forget()
                if cursor.ended:
                    return
                yield
                continue
            assert calls is not None
            place, _, mark = min(places)
            self._say(text[:place])
            cursor.place += place
            cursor.forget()
            try:
                found = yield from read_call(cursor, calls, self._types)
            except NotSo:
                faults += 1
                cursor.place = len(mark)
                self._say(mark)
                cursor.forget()
                continue
            self._called(found, calls)
            if calls.tail:
                yield from cursor.is_next(calls.tail)
            cursor.forget()

    def _bare_calls(self, calls: CallFormat) -> Reading:
        """A reply that is JSON: the calls that it begins with."""
        cursor = self._cursor
        while True:
            start = cursor.place
            try:
                yield from cursor.space()
                while self._has_calls and cursor.text[cursor.place : cursor.place + 1] in (",", ";"):
                    cursor.place += 1
                    yield from cursor.space()
                found = yield from read_call(cursor, calls, self._types)
                if self._types and not all(call.name in self._types for call in found):
                    raise NotSo
            except NotSo:
                cursor.place = start
                return
            self._called(found, calls)

    def _called(self, found: Sequence[ToolCall], calls: CallFormat) -> None:
        """Calls have come: what the template puts between words and calls is not the words'."""
        if self._has_content and not self._has_calls:
            rest = self._space.removesuffix(calls.joint)
            if rest:
                self._new.append(Delta(content=rest))
        self._space, self._has_calls = "", True
        self._new += [Delta(call=call) for call in found]

    def _say(self, text: str) -> None:
        """Content; its last white space is held back, for a call may follow."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._has_content = True
            self._new.append(Delta(content=said))
