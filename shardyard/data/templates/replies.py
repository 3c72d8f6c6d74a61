"""A reply's text by the rules of a declarative template: its thought, its words, its calls."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import without_thoughts
from shardyard.data.templates.spec import TemplateSpec, Thinking, ToolFormat, fill
from shardyard.data.templates.tool_text import calls_text
from shardyard.data.types import Message


class Reply(NamedTuple):
    """``given`` ends the prompt; ``text`` is trained, and lacks the template's end of a reply."""

    given: str
    text: str


def thought_of(turn: Message, thinking: Thinking) -> str:
    """The thought that a reply has, given apart or inline, without the line ends around it."""
    if turn.reasoning is not None:
        return turn.reasoning.strip("\n")
    opened, closed = thinking.marks
    before, found, _ = turn.content.partition(closed)
    return before.rpartition(opened)[2].strip("\n") if found else ""


class ReplyWriter:
    """Writes replies by one template; ``tools`` is its tool format.

    ``enable_thinking`` is ``data.enable_thinking``; false removes every thought.
    """

    def __init__(self, spec: TemplateSpec, tools: ToolFormat, *, enable_thinking: bool | None) -> None:
        self._spec = spec
        self._tools = tools
        self._enable_thinking = enable_thinking

    def write(self, turn: Message, *, is_current: bool, after_results: bool) -> Reply:
        """``is_current``: the reply follows the last question; ``after_results``: it follows tool results.

        Raises:
            NotUsable: nothing is left of the reply, or the template cannot write its calls.
        """
        thinking = self._spec.thinking
        if self._enable_thinking is False:
            turn = self._without_thought(turn)
        spared = thinking.cut_plain_only and (after_results or bool(turn.tool_calls))
        if thinking.inline == "keep" or spared:
            given, text, words = self._with_thought_inside(turn)
        else:
            given, text, words = self._with_thought_before(turn, is_current=is_current)
        if not text.strip() and not turn.tool_calls:
            raise NotUsable("a reply without anything but a thought, which the template leaves out")
        return Reply(given, text + self._calls(turn, words))

    def _without_thought(self, turn: Message) -> Message:
        """The reply as ``enable_thinking: false`` trains it."""
        words = without_thoughts(turn.content, self._spec.thinking.marks)
        if not words.strip() and not turn.tool_calls:
            raise NotUsable("a reply without anything but a thought, which enable_thinking: false removes")
        return replace(turn, content=words, reasoning=None)

    def _with_thought_inside(self, turn: Message) -> tuple[str, str, str]:
        """What is given, the text, its words: inline thoughts stay, one given apart is put before them."""
        thinking = self._spec.thinking
        written = bool(thinking.open or thinking.close)
        content = turn.content
        if turn.reasoning is not None and written:
            thought = turn.reasoning.strip() if thinking.trim else turn.reasoning.strip("\n")
            content = thinking.open + thought + thinking.close + content.lstrip("\n")
        text = self._words(content)
        # without words of its own for thoughts, a template knows an inline one as text
        words = content.rpartition(thinking.marks[1])[2].strip("\n") if written else content
        if any(mark in content for mark in thinking.marks) and self._enable_thinking is not False:
            return "", text, words
        given, trained = self._empty_thought()
        return given, trained + text, words

    def _with_thought_before(self, turn: Message, *, is_current: bool) -> tuple[str, str, str]:
        """The same for a template that parts a thought from the words, which follow it."""
        thinking = self._spec.thinking
        words = turn.content.rpartition(thinking.marks[1])[2]
        thought = thought_of(turn, thinking) if thinking.inline == "apart" else ""
        if not thought or not (is_current or thinking.earlier == "keep") or self._enable_thinking is False:
            given, trained = self._empty_thought()
            return given, trained + self._words(words), words
        given, opened = (thinking.open, "") if thinking.open_given else ("", thinking.open)
        thought = thought.strip() if thinking.trim else thought
        return given, opened + thought + thinking.close + self._words(words.lstrip("\n")), words

    def _empty_thought(self) -> tuple[str, str]:
        """The empty thought as what is given and what is trained."""
        empty = self._spec.thinking.empty
        return (empty, "") if self._enable_thinking in self._spec.thinking.empty_given else ("", empty)

    def _words(self, text: str) -> str:
        text = text.strip() if "assistant" in self._spec.trim else text
        return fill(self._spec.assistant.text, content=text) if text else ""

    def _calls(self, turn: Message, words: str) -> str:
        style = self._tools.calls
        if not turn.tool_calls or style is None:
            return ""
        if not style.words and words.strip():
            raise NotUsable("the template does not write words beside a function call")
        return (style.after_words if words else "") + calls_text(style, turn.tool_calls)
