"""Which chat template an exported model carries: the one that it was trained with."""

from __future__ import annotations

import logging
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.build import exported_chat_template
from shardyard.data.templates.render import Renderer
from shardyard.data.types import Conversation, Message
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

_QUESTION = (Message("user", "Question?"), Message("assistant", "Answer."))
_PROBES = (Conversation(_QUESTION), Conversation(_QUESTION, system="Be brief."))


def template_for_export(
    tokenizer: Any,
    name: str | None,
    *,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
    tool_format: str | None = None,
) -> str | None:
    """The jinja that the export must carry; None where the tokenizer's own serves.

    The other values are those of the training. The tokenizer's own template stays if it asks a question, with
    and without a system message, in the words that training used: it may know more than ours does.
    """
    trained = exported_chat_template(
        name, enable_thinking=enable_thinking, default_system=default_system, tool_format=tool_format
    )
    if trained is None or not tokenizer.chat_template:
        return trained
    try:
        own, ours = (
            [renderer.render(probe, 1, generation_prompt=True) for probe in _PROBES]
            for renderer in (
                Renderer(tokenizer, enable_thinking),
                Renderer(tokenizer, enable_thinking, chat_template=trained),
            )
        )
    except (NotUsable, UserError):
        own, ours = [""], []
    if own == ours:
        return None
    _log.warning(
        "the export carries the chat template that was trained, data.template: %s: the tokenizer's own asks "
        "in other words",
        name,
    )
    return trained
