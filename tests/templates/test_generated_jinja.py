"""The jinja generated for an export renders what the engine writes, for every named template."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.families import as_messages, plain_talk
from support.tokenizers import byte_tokenizer

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.build import build_template, exported_chat_template
from shardyard.data.templates.spec import known_templates, known_tool_formats
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

NAMES = sorted(known_templates())
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "天 <b>",
            "parameters": {
                "type": "object",
                "required": ["a"],
                "properties": {
                    "a": {"type": "string", "description": "A", "enum": ["x", "y"]},
                    "b": {"type": "array", "items": {"type": "integer"}},
                },
            },
        },
    },
    {"name": "g"},
)
ONE, TWO = ToolCall("f", {"a": "x", "b": [1, None]}), ToolCall("g", {})


def with_calls(calls: tuple[ToolCall, ...], said: str, thought: str | None) -> tuple[Message, ...]:
    return (
        Message("user", "Q"),
        Message("assistant", said, thought, calls),
        *(Message("tool", f'{{"r": "é{i}"}}') for i in range(len(calls))),
        Message("assistant", "R", thought),
        Message("user", "Q2"),
        Message("assistant", "R2"),
    )


CONVERSATIONS = {
    **{f"{n} turns, system {system}": plain_talk(n, system) for n in (1, 3) for system in (None, " S\n")},
    "inline thoughts": Conversation(
        tuple(
            Message(role, text)
            for n in (1, 2)
            for role, text in (("user", f"Q{n}"), ("assistant", f"<think>\nT{n}\n</think>\n\nR{n}"))
        )
    ),
    "thoughts apart": Conversation(
        (
            Message("user", "Q"),
            Message("assistant", "\nR", " why\n"),
            Message("user", "Q"),
            Message("assistant", "R", ""),
        )
    ),
    "odd thoughts": Conversation(
        (
            Message("user", "<think>Q</think>"),
            Message("assistant", "a<think>x<think>y</think>b</think>\n\nc<think>d"),
        )
    ),
    "tools": plain_talk(2, "S", tools=TOOLS),
    "tools, no system": plain_talk(1, tools=TOOLS),
    "one call": Conversation(with_calls((ONE,), "", None), "S", TOOLS),
    "calls, words": Conversation(with_calls((ONE, TWO), "I see", None), None, TOOLS),
    "calls, thoughts": Conversation(with_calls((ONE, TWO), "", "why"), None, TOOLS),
    "calls, tools untold": Conversation(with_calls((ONE, TWO), "", None)),
}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "[INST]", "[/INST]", "<|system|>",
    "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>", "[gMASK]", "<sop>",
    "<start_of_turn>", "<end_of_turn>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>", "<|start|>", "<|message|>", "<|channel|>",
)  # fmt: skip


@cache
def tokenizer_of(name: str) -> Any:
    tokenizer = byte_tokenizer(special=SPECIAL, eos="<eos>")
    tokenizer.bos_token = "<bos>"
    return tokenizer


def check(name: str, conversation: Conversation, **options: Any) -> bool:
    """Compare the whole text, and each prompt; False if the template drops the row."""
    tokenizer = tokenizer_of(name)
    try:
        template = build_template(name, tokenizer, **options)
        samples: list[Any] = template.samples(conversation)  # type: ignore[attr-defined]
    except NotUsable:
        return False
    tokenizer.chat_template = exported_chat_template(name, **options)
    first = 0 if conversation.system is None else 1
    messages = as_messages(conversation)
    replies = [first + n for n, turn in enumerate(conversation.turns) if turn.role == "assistant"]

    def render(stop: int | None = None, **asked: Any) -> str:
        tools = list(conversation.tools) or None
        return tokenizer.apply_chat_template(messages[:stop], tools=tools, tokenize=False, **asked)

    whole = "".join(piece.prompt + piece.reply for piece in samples[-1])
    assert render() == whole
    known = 0
    for pieces in samples:
        text = ""
        for piece in pieces:
            text += piece.prompt
            stop, known = replies[known], known + 1
            asked: dict[str, Any] = {"add_generation_prompt": True}
            if options["enable_thinking"] is not False:
                # null gives the empty thought to replies without one, R1 opens a thought for replies with
                # one: a prompt cannot know, so it is asked for
                plain = piece.prompt.endswith(("</think>\n\n", "final<|message|>", "<｜Assistant｜>"))
                asked["enable_thinking"] = not plain or name == "deepseek3"
            assert render(stop, **asked) == text
            text += piece.reply
    assert known == len(replies)
    return True


@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("name", NAMES)
def test_it_renders_what_is_trained(name: str, enable_thinking: bool | None) -> None:
    done = [key for key, row in CONVERSATIONS.items() if check(name, row, enable_thinking=enable_thinking)]
    assert "1 turns, system None" in done and "inline thoughts" in done
    assert ("one call" in done) == (name not in NO_TOOLS)
    assert ("1 turns, system  S\n" in done) == (name != "gemma")


NO_TOOLS = {"deepseek3", "deepseek_r1", "gemma", "gemma3", "llama3", "phi3"}
"""Families that are not told of tools."""


@pytest.mark.parametrize("tool_format", known_tool_formats())
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_any_tool_format_goes_with_any_template(name: str, tool_format: str) -> None:
    options = {"enable_thinking": True, "tool_format": tool_format}
    done = [key for key, row in CONVERSATIONS.items() if check(name, row, **options)]
    assert ("one call" in done) == (tool_format != "deepseek3")
    assert "calls, tools untold" in done or tool_format == "llama3"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma"])
def test_a_default_system_message_is_written_as_text(name: str) -> None:
    options = {"enable_thinking": True, "default_system": 'Say "é😀" {{ %} {content} {bos} \\n\n.'}
    assert check(name, CONVERSATIONS["3 turns, system None"], **options)
    assert check(name, CONVERSATIONS["3 turns, system  S\n"], **options)


def test_a_default_system_message_without_a_place_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.default_system: the template gemma has no place"):
        build_template("gemma", tokenizer_of("gemma"), default_system="S")
