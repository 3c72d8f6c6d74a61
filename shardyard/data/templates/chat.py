"""The tokenizer's own chat template, with label masks that are proven for each reply.

For the reply at turn k the template itself renders

    before  = turns 0..k-1 with the generation prompt       (what a model is given)
    through = turns 0..k without it                         (what it should have made of it)

The reply is what ``through`` adds to ``before``, and it is trained only if ``before`` is a true prefix of
``through``, as text and as ids. Where the template has no generation prompt, or one that its own replies do
not begin with, the reply begins where the renderings of two different replies part (``_header``). A reply
whose text does not hold the row's words, or that does not end as the template ends replies, is dropped.

If ``through`` of one reply is a prefix of ``through`` of the next, both share a sample. Otherwise the
template rewrites earlier turns (Qwen3 drops their thoughts) and a new sample begins: every reply is trained
in the very context that the model will meet.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import SampleWriter, Turn, common_prefix, find_thought, without_thoughts
from shardyard.data.templates.render import Renderer
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.data.types import Conversation, Message
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

_OPEN_MARK = re.compile(r"<[^<>\s]*$")

_PROBES = ("Aye", "Nay")
"""Two replies that part at their first character."""


class ChatTemplate:
    """See the module. ``chat_template`` is a user's, in place of the tokenizer's own.

    Raises:
        UserError: the tokenizer has no chat template, or one that cannot be used (with the reason).
    """

    name = "the tokenizer's chat template"
    cut: Literal["each_turn", "end"] = "end"

    def __init__(
        self,
        tokenizer: Any,
        tokens: TextTokenizer,
        *,
        enable_thinking: bool | None,
        default_system: str | None,
        train_on_prompt: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._tokens = tokens
        self._drop_thoughts = enable_thinking is False
        self._default_system = default_system
        self._train_on_prompt = train_on_prompt
        self._renderer = Renderer(tokenizer, enable_thinking, chat_template=chat_template)
        try:
            self._terminator = self._probe_replies()
        except NotUsable as error:
            raise UserError(
                f"data.template: the tokenizer's own chat template cannot be used: {error}; name a template "
                f"(data.template: qwen3) or another tokenizer"
            ) from error

    def encode(self, conversation: Conversation) -> list[list[Turn]]:
        """One sample, or as many as the template's rewriting of earlier turns asks for."""
        conversation, hidden = self._tokens.hide(self._prepared(conversation))
        self._renderer.require(conversation)
        writer = SampleWriter(self._tokens, hidden)
        for number, turn in enumerate(conversation.turns):
            if turn.role != "assistant":
                continue
            before, through = self._reply_bounds(conversation, number)
            self._check_reply(turn, through[len(before) :])
            lost = _loses_thought(turn, through[len(before) :])
            context = partial(self._context, conversation, number, before)
            writer.add(before, through, trained=turn.train, lost_thought=lost, context=context)
        return writer.samples

    def _context(self, conversation: Conversation, number: int, before: str) -> str:
        """What of ``before`` is no longer to be trained where a new sample begins: up to the content of the
        turn behind the previous reply, which is where renderings with other contents part.

        Empty if prompts are not trained at all.
        """
        turns = conversation.turns
        earlier = [place for place in range(number) if turns[place].role == "assistant"]
        if not self._train_on_prompt or not earlier:
            return ""
        place = earlier[-1] + 1
        for word in _PROBES:
            changed = (*turns[:place], replace(turns[place], content=word), *turns[place + 1 :])
            asked = replace(conversation, turns=changed)
            before = common_prefix(before, self._renderer.render(asked, number, generation_prompt=True))
        return before

    def _prepared(self, conversation: Conversation) -> Conversation:
        """With the default system message, and without thoughts if thinking is off."""
        system = conversation.system or self._default_system or None
        turns = conversation.turns
        if self._drop_thoughts:
            turns = tuple(_without_thought(turn) for turn in turns)
        return Conversation(turns, system, conversation.tools, conversation.where)

    def _reply_bounds(self, conversation: Conversation, number: int) -> tuple[str, str]:
        """``before`` (up to where the reply begins) and ``through``; the first is a prefix of the second."""
        render = self._renderer.render
        through = render(conversation, number + 1)
        before = render(conversation, number, generation_prompt=True)
        given = render(conversation, number)
        if not through.startswith(before) or before == given:
            before = self._header(conversation, number, before, given)
            if not through.startswith(before):
                raise NotUsable("the chat template does not begin this reply as it begins others")
        return before, through

    def _header(self, conversation: Conversation, number: int, before: str, given: str) -> str:
        """Where the reply begins if not after ``before``; ``given`` is the rendering before any header.

        The renderings of two plain replies part at the reply's first character. What they share is the
        header, and it has to extend ``given``. A template without a generation prompt (``before`` is
        ``given``) gives all of it. Where the generation prompt goes on in another way than the header (it
        opens a thought that the template's replies lack or close at once), what both share is given.
        """
        first, second = (
            self._renderer.render(_answered(conversation, number, word), number + 1) for word in _PROBES
        )
        header = common_prefix(first, second)
        if header.startswith(given):
            if header.startswith(before):
                return header
            # a mark that both only begin alike (<think>, </think>) is shared by neither
            shared = _OPEN_MARK.sub("", common_prefix(header, before))
            if len(shared) > len(given):
                return shared
        raise NotUsable("the chat template rewrites the prompt when a reply follows it")

    def _check_reply(self, turn: Message, reply: str) -> None:
        """Raise NotUsable unless ``reply`` holds what the row says and ends as replies end."""
        if turn.content.rpartition("</think>")[2].strip() not in reply:
            raise NotUsable("the chat template does not write the reply as the row has it")
        if find_thought(turn.content) and reply.count("</think>") > turn.content.count("</think>"):
            raise NotUsable(
                "the chat template writes a thought of its own before the reply's; "
                "it wants thoughts apart, as reasoning_content"
            )
        if not all(call.name in reply for call in turn.tool_calls):
            raise NotUsable("the chat template does not write function calls")
        if not turn.tool_calls and not reply.endswith(self._terminator):
            raise NotUsable("the chat template ends this reply in another way than others")

    def _probe_replies(self) -> str:
        """What the template writes after a reply; tells of what a user should know about it."""
        asked = Conversation((Message("user", "Question?"),))
        answered = _answered(asked, 1, _PROBES[0])
        longer = Conversation((*answered.turns, *_answered(asked, 1, _PROBES[1]).turns))
        before, through = self._reply_bounds(answered, 1)
        _, found, terminator = through[len(before) :].rpartition(_PROBES[0])
        if not found:
            raise NotUsable("it does not write the assistant's reply")
        prompt = self._renderer.render(asked, 1, generation_prompt=True)
        ignores_request = prompt == self._renderer.render(asked, 1)
        if ignores_request and not self._renderer.render(longer, 4).startswith(through):
            raise NotUsable(
                "it ignores add_generation_prompt and writes something after the last reply that it does not "
                "write after others, so the end of a reply cannot be told"
            )
        if not terminator.strip():
            _log.warning(
                "the tokenizer's chat template writes no end-of-turn token after a reply: a model trained "
                "with it does not learn where to stop"
            )
        if len(prompt) > len(before):
            _log.warning(
                "the tokenizer's chat template ends a prompt with %r, which its own replies do not follow: "
                "replies are trained in its place",
                prompt[len(before) :],
            )
        elif not ignores_request:
            self._tell_joined_space(before, through)
        return terminator

    def _tell_joined_space(self, before: str, through: str) -> None:
        """Warn of a generation prompt with white space that no reply is trained to follow."""
        space = before[len(before.rstrip()) :]
        if not space or through[len(before)].isspace():
            return
        given = self._tokens.ids(before, {})
        if self._tokens.ids(through, {})[: len(given)] != given:
            _log.warning(
                "the tokenizer's chat template ends a prompt with %r, which this tokenizer joins to "
                "a reply's first word: replies are trained to begin with it; leave it out of prompts",
                space,
            )


def _answered(conversation: Conversation, number: int, reply: str) -> Conversation:
    """The first ``number`` turns and a plain reply."""
    turns = (*conversation.turns[:number], Message("assistant", reply))
    return Conversation(turns, conversation.system, conversation.tools)


def _loses_thought(turn: Message, reply: str) -> bool:
    """Whether the template leaves out this reply's thought."""
    inline = find_thought(turn.content)
    thought = turn.reasoning or (turn.content[slice(*inline)] if inline else "")
    return thought.removeprefix("<think>").removesuffix("</think>").strip() not in reply


def _without_thought(turn: Message) -> Message:
    if turn.role != "assistant":
        return turn
    content = without_thoughts(turn.content)
    if not content.strip() and not turn.tool_calls:
        raise NotUsable("a reply without anything but a thought, which enable_thinking: false removes")
    return replace(turn, content=content, reasoning=None)
