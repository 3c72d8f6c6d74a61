"""A chat as lm-eval has it -> the text that the model is given, by its chat template in our sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.meter import Stopped
from shardyard.data.templates.render import Renderer
from shardyard.data.types import Conversation, Message
from shardyard.errors import UserError


class ChatText:
    """Raises UserError for a tokenizer whose template cannot be used."""

    def __init__(self, tokenizer: Any, enable_thinking: bool | None) -> None:
        self._renderer = Renderer(tokenizer, enable_thinking)

    def text(self, messages: Sequence[dict[str, str]], *, continue_final: bool = False) -> str:
        """The text of ``messages`` up to where the model goes on: a new reply, or the last message.

        A template that refuses a system message gets it as the beginning of the user's first one.
        """
        begun = messages[-1]["content"] if continue_final else ""
        shown = list(messages[:-1] if continue_final else messages)
        system = "\n".join(one["content"] for one in shown if one["role"] == "system") or None
        turns = [Message(one["role"], one["content"]) for one in shown if one["role"] != "system"]  # pyright: ignore[reportArgumentType]
        try:
            return self._render(turns, system) + begun
        except NotUsable as error:
            if system is None or not turns:
                raise UserError(f"the chat template refuses a prompt: {error}") from error
        turns[0] = Message("user", f"{system}\n{turns[0].content}")
        try:
            return self._render(turns, None) + begun
        except NotUsable as error:
            raise UserError(f"the chat template refuses a prompt: {error}") from error

    def _render(self, turns: list[Message], system: str | None) -> str:
        conversation = Conversation(tuple(turns), system)
        try:
            return self._renderer.render(conversation, len(turns), generation_prompt=True)
        except Stopped as error:
            raise UserError(f"the chat template was stopped: {error}") from error
