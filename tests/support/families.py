"""The families' own chat templates, which the trl wheel carries, and tiny tokenizers with their tokens."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from support.tokenizers import byte_tokenizer

from shardyard.data.types import Conversation, Message, ToolCall


class Family(NamedTuple):
    """A family: its template's file in the wheel, and the tokens of its tokenizer."""

    file: str
    tokens: tuple[str, ...]
    bos: str | None
    eos: str
    arguments_as_text: bool = False
    """Its template joins a call's arguments as text."""


_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
)  # fmt: skip

FAMILIES = {
    "qwen2.5": Family("qwen2_5", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>"),
    "llama3": Family("llama3", _LLAMA, _LLAMA[0], "<|eot_id|>"),
    "llama3.1": Family("llama3_1", _LLAMA, _LLAMA[0], "<|eot_id|>"),
    "deepseek3": Family("deepseekv3", _DEEPSEEK, *_DEEPSEEK[:2], arguments_as_text=True),
    "deepseek_r1": Family("deepseek_r1_distill", _DEEPSEEK, *_DEEPSEEK[:2], arguments_as_text=True),
    "glm4": Family("glm4moe", _GLM, None, "<|endoftext|>"),
    "gemma": Family("gemma", _GEMMA, *_GEMMA[:2]),
    "gemma3": Family("gemma3", _GEMMA, *_GEMMA[:2]),
    "phi3": Family(
        "phi3", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), None, "<|endoftext|>"
    ),
}
"""By the name of our template."""


def family_tokenizer(name: str) -> Any:
    """A tiny tokenizer with the tokens and the chat template of ``name``'s family."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family_template(family.file), special=family.tokens, eos=family.eos)
    if family.bos is not None:
        tokenizer.bos_token = family.bos
    return tokenizer


def family_template(file: str) -> str:
    """The jinja text; the package around it is not imported."""
    path = Path(str(distribution("trl").locate_file(f"trl/chat_templates/{file}.jinja")))
    return path.read_text(encoding="utf-8")


def as_messages(conversation: Conversation, *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form, as ``apply_chat_template`` wants it."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [_call(call, arguments_as_text) for call in turn.tool_calls]
        messages.append(message)
    return messages


def _call(call: ToolCall, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def plain_talk(turns: int, system: str | None = None, **fields: Any) -> Conversation:
    """``turns`` questions and their replies, with white space that some templates trim."""
    texts = (
        ("Name a river.", " Why?\n", "Say more", "Thanks!  "),
        ("The Rhine.", "It is long.\n", "  So be it", "Bye"),
    )
    messages = [
        Message(role, texts[number][turn])
        for turn in range(turns)
        for number, role in enumerate(("user", "assistant"))
    ]  # type: ignore[arg-type]
    return Conversation(tuple(messages), system, **fields)
