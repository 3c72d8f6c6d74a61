"""A conversation -> the token ids of the prompt of its next reply, as the model was trained to see it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import common_prefix
from shardyard.data.templates.render import Renderer
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError
from shardyard.infer.openai_messages import ChatFault, from_openai
from shardyard.infer.replies import ReplyFormat, find_reply_format

_log = logging.getLogger("shardyard.infer")

_PROBES = ("Aye", "Nay")
_ASKED = Conversation((Message("user", "Question?"),))
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is gone on with; templates that trim it take its space."""
_MARKUP = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. ``in_thought``: it ends inside a thought, which the reply goes on with."""

    text: str
    ids: list[int]
    in_thought: bool


class ChatFormat:
    """Renders prompts by the tokenizer's chat template, or by ``chat_template``, in our sandbox.

    The ids are those of ``apply_chat_template(..., add_generation_prompt=True)``. A template without a
    generation prompt gets the header that replies begin with, which training gives as well.
    ``enable_thinking`` holds where a call does not say; None leaves it to the template. ``default_system`` is
    shown where a conversation has no system message. ``split_special_tokens``: special tokens that texts
    spell out are plain text.

    Safe to call from any thread.

    Raises:
        UserError: there is no chat template, or one that cannot be used.
    """

    from_openai = staticmethod(from_openai)

    def __init__(
        self,
        tokenizer: Any,
        *,
        enable_thinking: bool | None = None,
        chat_template: str | None = None,
        default_system: str | None = None,
        split_special_tokens: bool = False,
    ) -> None:
        if not (chat_template or tokenizer.chat_template):
            raise UserError(
                "the model has no chat template, so it cannot be asked in a chat: `shardyard generate` goes "
                "on from raw prompts; --template names a template (qwen3, llama3, a .jinja file) to use"
            )
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._chat_template = chat_template
        self._default_system = default_system or None
        self._tokens = TextTokenizer(tokenizer, split_special_tokens=split_special_tokens)
        self._renderers: dict[bool | None, Renderer] = {}
        self._lock = Lock()
        with _as_faults():
            self.replies: ReplyFormat = find_reply_format(self._renderer(enable_thinking))
            self.stop_ids, self.stop_texts = self._ends()

    @classmethod
    def of(cls, opened: Any) -> ChatFormat:
        """That of an opened model (`Opened`), with what its training said of thoughts, system and tokens."""
        data = (opened.run or {}).get("data") or {}
        model = (opened.run or {}).get("model") or {}
        choice = opened.choice
        thinking = choice.enable_thinking
        own = choice.template is None
        # a named template's text holds the training's system message; the tokenizer's own does not
        of_tokenizer = own and not _is_named(data.get("template"))
        return cls(
            opened.tokenizer,
            enable_thinking=data.get("enable_thinking") if thinking is None and own else thinking,
            default_system=data.get("default_system") if of_tokenizer else None,
            split_special_tokens=bool(model.get("split_special_tokens")),
        )

    def ids(
        self,
        conversation: Conversation,
        *,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """The ids of the prompt; see `prompt`."""
        return self.prompt(conversation, enable_thinking=enable_thinking, continue_final=continue_final).ids

    def prompt(
        self,
        conversation: Conversation,
        *,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
    ) -> Prompt:
        """The prompt of the next reply; with ``continue_final`` of the rest of the last one.

        Raises:
            ChatFault: the template refuses the conversation, or would leave out its tools or calls.
        """
        if conversation.system is None and self._default_system is not None:
            conversation = replace(conversation, system=self._default_system)
        thinking = self._enable_thinking if enable_thinking is None else enable_thinking
        with self._lock, _as_faults():
            renderer = self._renderer(thinking)
            conversation, hidden = self._tokens.hide(conversation)
            renderer.require(conversation)
            write = _continued if continue_final else _asked
            text = write(renderer, conversation)
            in_thought = self.replies.opens_thought(text)
            if continue_final:
                in_thought = self.replies.is_inside_thought(conversation.turns[-1].content)
            return Prompt(text, self._tokens.ids(text, hidden), in_thought)

    def _renderer(self, thinking: bool | None) -> Renderer:
        if thinking not in self._renderers:
            try:
                self._renderers[thinking] = Renderer(
                    self._tokenizer, thinking, chat_template=self._chat_template
                )
            except UserError as error:
                raise UserError(str(error).replace("data.template: ", "chat template: ")) from error
        return self._renderers[thinking]

    def _ends(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """What the template writes behind replies: tokens, and markup that is no token of this tokenizer."""
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        ids: set[int] = set()
        texts: list[str] = []
        for ending in _endings(self._renderer(self._enable_thinking)):
            behind = ending.lstrip()
            token = max((name for name in special if behind.startswith(name)), key=len, default=None)
            if token is not None:
                ids.add(int(self._tokenizer.convert_tokens_to_ids(token)))
            elif (mark := _MARKUP.match(behind)) and mark[0] not in texts:
                texts.append(mark[0])
                _log.warning(
                    "the chat template ends replies with %s, which is no token of this tokenizer: it is "
                    "looked for in the answer's text; is the template the model's own?",
                    mark[0],
                )
        return frozenset(ids), tuple(texts)


def _is_named(template: Any) -> bool:
    return isinstance(template, str) and not template.endswith((".jinja", ".jinja2", ".j2"))


@contextmanager
def _as_faults() -> Iterator[None]:
    try:
        yield
    except NotUsable as error:
        field = "tools" if "show tools" in str(error) else "messages"
        raise ChatFault(field, str(error)) from None
    except RecursionError:
        raise ChatFault("messages", "nested too deep") from None


def _asked(renderer: Renderer, conversation: Conversation) -> str:
    turns = len(conversation.turns)
    prompt = renderer.render(conversation, turns, generation_prompt=True)
    given = renderer.render(conversation, turns)
    if prompt != given or not turns:
        return prompt
    try:
        first, second = (renderer.render(_answered(conversation, word), turns + 1) for word in _PROBES)
    except NotUsable:  # two replies one after the other, say
        return prompt
    header = common_prefix(first, second).rstrip(" ")
    return header if header.startswith(prompt) else prompt


def _answered(conversation: Conversation, reply: str, *more: Message) -> Conversation:
    return replace(conversation, turns=(*conversation.turns, Message("assistant", reply), *more))


def _continued(renderer: Renderer, conversation: Conversation) -> str:
    """As transformers does it: cut where a mark behind the content is written."""
    last = conversation.turns[-1] if conversation.turns else None
    if last is None or last.role != "assistant":
        raise ChatFault("messages", "the last message has to be an assistant's, to go on with it")
    if last.tool_calls:
        raise ChatFault(
            "messages", "the last message has calls behind its content, and cannot be gone on with"
        )
    marked = replace(last, content=last.content + _CUT)
    turns = (*conversation.turns[:-1], marked)
    text = renderer.render(replace(conversation, turns=turns), len(turns))
    place = text.rfind(_CUT.strip())
    if place < 0 or last.content.strip() not in text:
        raise ChatFault("messages", "the chat template does not write the last message as it stands")
    return text[:place] if text.startswith(_CUT, place) else text[:place].rstrip()


def _endings(renderer: Renderer) -> Iterator[str]:
    """What stands behind replies: at the end, before a question, and before the result of a call."""
    question, call = Message("user", "Question?"), (ToolCall("probe_name", {"k": "probe_value"}),)
    last = _behind(renderer, _answered(_ASKED, "Aye"))
    yield last
    yield _behind(renderer, _answered(_ASKED, "Aye", question))
    if last.strip():
        return
    # a template that ends a reply by the next turn's mark
    turns = (question, Message("assistant", "", tool_calls=call), Message("tool", "probe_result"))
    try:
        text, through = (renderer.render(Conversation(turns), number) for number in (3, 2))
    except NotUsable:
        return
    if text.startswith(through):
        yield text[len(through) :]


def _behind(renderer: Renderer, conversation: Conversation) -> str:
    text = renderer.render(conversation, len(conversation.turns))
    return text[text.rfind("Aye") + len("Aye") :]
