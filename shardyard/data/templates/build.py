"""``data.template`` -> the template object."""

from __future__ import annotations

import logging
from typing import Any

from shardyard.data.templates import qwen3
from shardyard.data.templates.base import Template
from shardyard.data.templates.chat import ChatTemplate
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

_LATER = ("gpt", "empty")


def build_template(
    name: str | None,
    tokenizer: Any,
    *,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
    tool_format: str | None = None,
    split_special_tokens: bool = False,
) -> Template:
    """The template of ``data.template``; None is the tokenizer's own chat template.

    ``qwen3`` makes ``<|im_end|>`` the tokenizer's eos token, as the reference does.

    Raises:
        UserError: an unknown name, a tokenizer without the template's tokens or without a chat template, or a
            chat template whose masks cannot be proven right.
    """
    tokens = TextTokenizer(tokenizer, split_special_tokens=split_special_tokens)
    if name is None:
        if tool_format is not None:
            _log.warning("data.tool_format has no effect: the tokenizer's own chat template writes the tools")
        return ChatTemplate(tokenizer, tokens, enable_thinking=enable_thinking, default_system=default_system)
    if name in _LATER:
        raise UserError(f"data.template: {name} comes with the data release; use qwen3, or null")
    if name != "qwen3":
        raise UserError(
            f"data.template: {name!r} is not a template; use qwen3, or null for the tokenizer's own"
        )
    if tool_format not in (None, "qwen"):
        raise UserError(f"data.tool_format: {tool_format!r} comes with the data release; qwen3 writes qwen's")
    missing = [marker for marker in qwen3.MARKERS if not _is_token(tokenizer, marker)]
    if missing:
        raise UserError(
            f"data.template: qwen3 needs the tokens {' and '.join(missing)}, which the tokenizer "
            f"{tokenizer.name_or_path!r} lacks; set data.template to null to use its own chat template"
        )
    if tokenizer.eos_token != "<|im_end|>":
        tokenizer.eos_token = "<|im_end|>"
    return qwen3.Qwen3Template(tokens, enable_thinking=enable_thinking, default_system=default_system)


def _is_token(tokenizer: Any, text: str) -> bool:
    """Whether ``text`` is one token wherever it stands."""
    return text in tokenizer.get_vocab() and len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
