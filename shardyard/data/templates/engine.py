"""One engine for every named template: a conversation and a declarative template -> texts -> turns.

Where the template leaves out the thoughts of replies before the last question, a conversation with such
thoughts becomes one sample per question: every reply is trained in the very context that the model will meet.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import SampleWriter, Turn
from shardyard.data.templates.replies import ReplyWriter, thought_of
from shardyard.data.templates.spec import TemplateSpec, ToolFormat, fill
from shardyard.data.templates.tokens import Hidden, TextTokenizer
from shardyard.data.templates.tool_text import json_text, tools_text
from shardyard.data.types import Conversation, Message


class Piece(NamedTuple):
    """One reply of a sample, as text; ``prompt`` is all since the previous reply."""

    prompt: str
    reply: str
    message: Message
    context: int = 0
    """So many of the prompt's first characters end with a reply of an earlier sample."""


class NamedTemplate:
    """A template of the package or of the user's file; ``tools`` is its tool format, or None.

    ``spec`` and ``tools`` hold no ``{bos}`` and ``{eos}`` any more (build.py).
    """

    cut: Literal["each_turn", "end"] = "each_turn"

    def __init__(
        self,
        name: str,
        spec: TemplateSpec,
        tools: ToolFormat | None,
        tokens: TextTokenizer,
        *,
        enable_thinking: bool | None,
        default_system: str | None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.tools = tools or ToolFormat()
        self.enable_thinking = enable_thinking
        self.default_system = spec.default_system if default_system is None else default_system
        self._tokens = tokens
        self._replies = ReplyWriter(spec, self.tools, enable_thinking=enable_thinking)
        markers = spec.assistant.ended_by
        self._stops = [tokens.ids(marker, {})[0] for marker in (markers[0], markers[-1])] if markers else []
        """The tokens that end a reply in words and one that calls, where they belong to the next turn."""

    def encode(self, conversation: Conversation) -> list[list[Turn]]:
        """One sample, or one per question where earlier thoughts are left out.

        Raises:
            NotUsable: the template has no place for something that the conversation holds, or a reply's
                tokens cannot be told from the prompt's.
        """
        conversation, hidden = self._tokens.hide(conversation)
        samples = self.samples(conversation)
        if self.spec.pieces == "apart":
            return [[self._turn(piece, conversation, hidden) for piece in pieces] for pieces in samples]
        writer = SampleWriter(self._tokens, hidden)
        for pieces in samples:
            text = ""
            for piece in pieces:
                lost = self._loses_thought(piece)
                before, text = text + piece.prompt, text + piece.prompt + piece.reply
                context = before[: len(before) - len(piece.prompt) + piece.context]
                writer.add(
                    before,
                    text,
                    trained=piece.message.train,
                    lost_thought=lost,
                    context=partial(str, context),
                )
            if self._stops:
                calls = bool(pieces[-1].message.tool_calls)
                writer.samples[-1][-1] = writer.samples[-1][-1]._replace(stop=self._stops[calls])
        return writer.samples

    def samples(self, conversation: Conversation) -> list[list[Piece]]:
        """The texts of each sample: a sample is its prompts and replies end to end.

        Raises:
            NotUsable: the template has no place for something that the conversation holds.
        """
        self._require(conversation)
        last = len(conversation.turns)
        if not self._rewrites(conversation):
            return [self._finished(self._pieces(conversation, last))]
        questions = [number for number, turn in enumerate(conversation.turns) if turn.role == "user"]
        samples: list[list[Piece]] = []
        before: list[Piece] = []
        for stop in [*questions[1:], last]:
            pieces = self._pieces(conversation, stop)
            known = len(before)
            if samples and pieces[:known] == before:
                samples[-1] += pieces[known:]
            else:
                given = "".join(piece.prompt + piece.reply for piece in pieces[:known])
                first, *others = pieces[known:]
                first = first._replace(prompt=given + first.prompt, context=len(given))
                samples.append([first, *others])
            before = pieces
        return [self._finished(pieces) for pieces in samples]

    def _turn(self, piece: Piece, conversation: Conversation, hidden: Hidden) -> Turn:
        """A reply whose ids are those of its own text, as a model meets them after the prompt's."""
        lost = self._loses_thought(piece)
        prompt, reply = self._tokens.ids(piece.prompt, hidden), self._tokens.ids(piece.reply, hidden)
        context = self._tokens.num_shared(piece.prompt[: piece.context], prompt, hidden)
        return Turn(prompt, reply, piece.message.train, lost, context=context)

    def _rewrites(self, conversation: Conversation) -> bool:
        """Whether a later question changes the text of an earlier reply."""
        thinking = self.spec.thinking
        if thinking.earlier == "keep" or self.enable_thinking is False:
            return False
        return any(turn.role == "assistant" and thought_of(turn, thinking) for turn in conversation.turns)

    def _finished(self, pieces: list[Piece]) -> list[Piece]:
        """With what ends the sample, and the next turn's marker at the end of the reply that it ends."""
        finished: list[Piece] = []
        for piece in pieces:
            marker = next(filter(piece.prompt.startswith, self.spec.assistant.ended_by), "")
            if marker and finished:
                finished[-1] = finished[-1]._replace(reply=finished[-1].reply + marker)
                piece = piece._replace(prompt=piece.prompt[len(marker) :])
            finished.append(piece)
        finished[-1] = finished[-1]._replace(reply=finished[-1].reply + self.spec.end)
        return finished

    def _require(self, conversation: Conversation) -> None:
        """Raise NotUsable for tools, calls and results that the template does not know."""
        turns = conversation.turns
        calling = [turn for turn in turns if turn.tool_calls]
        if conversation.tools and self.tools.list is None:
            raise NotUsable(f"the template {self.name} does not show tools to the model")
        if self.tools.calls is None:
            if calling:
                raise NotUsable(f"the template {self.name} does not write function calls")
            if any(turn.role == "tool" for turn in turns):
                raise NotUsable(f"the template {self.name} does not write tool results")
        elif self.tools.calls.rounds is not None:
            answers = [turn for before, turn in pairwise(turns) if (before.role, turn.role) == _ANSWER]
            most = max(len(calling), len(answers))
            if most > self.tools.calls.rounds or any(turn.tool_calls for turn in answers):
                raise NotUsable(f"the template {self.name} writes one round of function calls, not several")

    def _pieces(self, conversation: Conversation, stop: int) -> list[Piece]:
        """The replies among the first ``stop`` turns."""
        spec, turns = self.spec, conversation.turns[:stop]
        question = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)
        pieces: list[Piece] = []
        prompt, in_first = self._opening(conversation)
        results: list[str] = []
        for number, turn in enumerate(turns):
            if turn.role == "tool":
                results.append(turn.content)
            elif turn.role == "user":
                asked = (in_first if number == 0 else "") + self._asked(turn.content)
                prompt += (spec.separator if number else "") + fill(spec.user, content=asked)
            else:
                header = spec.assistant.header
                if results and spec.assistant.header_after_results is not None:
                    header = spec.assistant.header_after_results
                given, text = self._replies.write(
                    turn, is_current=number > question, after_results=bool(results)
                )
                prompt += self._results(results) + header + given
                pieces.append(Piece(prompt, text + spec.assistant.end, turn))
                prompt, results = "", []
        return pieces

    def _opening(self, conversation: Conversation) -> tuple[str, str]:
        """What stands before the first turn, and in front of the first question's text."""
        spec, style = self.spec, self.tools.list
        tools = tools_text(style, conversation.tools) if style and conversation.tools else ""
        system = conversation.system or self.default_system
        system = system.strip() if "system" in spec.trim else system
        opening, in_first = spec.prefix, ""
        if tools and spec.tools_at == "prefix":
            opening += fill(spec.tools_slot, content=tools)
        elif tools and spec.tools_at == "system":
            system += tools
        elif tools:
            in_first = tools
        if spec.system is not None:
            slot = spec.system_with_tools if tools and spec.system_with_tools is not None else spec.system
            opening += fill(slot, content=system) if system or spec.system_always else ""
        elif system and spec.system_in_user is None:
            raise NotUsable(f"the template {self.name} has no place for a system message")
        elif system:
            in_first = fill(spec.system_in_user or "", content=system) + in_first
        return opening, in_first

    def _asked(self, question: str) -> str:
        """A question's text."""
        text = question.strip() if "user" in self.spec.trim else question
        ending = self.spec.user_without_thinking if self.enable_thinking is False else ""
        return text if text.endswith(ending) else text + ending

    def _results(self, results: list[str]) -> str:
        """Tool results in a row."""
        style = self.spec.result_style
        if not results:
            return ""
        written = (fill(style.each, content=result, json=json_text(result)) for result in results)
        return style.before + style.between.join(written) + style.after

    def _loses_thought(self, piece: Piece) -> bool:
        """Whether the reply leaves out the row's thought."""
        if self.enable_thinking is False:
            return False
        return thought_of(piece.message, self.spec.thinking).strip() not in piece.reply


_ANSWER = ("tool", "assistant")
"""Roles of a tool's last result and of the reply to it."""
