"""The chat template that an export gets renders, turn by turn, what the named template trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tokenizers import byte_tokenizer

from shardyard.data.templates import build_template
from shardyard.data.templates.build import exported_chat_template
from shardyard.data.types import Conversation, Message, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'c'", "parameters": {}}}
CALLS = (ToolCall("add", {"a": 1, "b": [True, None], "c": "é<\"'\n"}), ToolCall("zero", {}))
CONVERSATIONS = {
    "plain": Conversation((Message("user", "Q"), Message("assistant", "R"))),
    "system": Conversation((Message("user", "Q"), Message("assistant", "R")), system="S\n"),
    "empty system": Conversation((Message("user", " Q\n"), Message("assistant", "R ")), system=""),
    "several": Conversation(
        tuple(
            message
            for number in (1, 2, 3)
            for message in (
                Message("user", f"Q{number}"),
                Message("assistant", f"<think>\nT{number}\n</think>\n\nR"),
            )
        )
    ),
    "reasoning": Conversation(
        (
            Message("user", "Q"),
            Message("assistant", "\n\nR", "\nwhy\n"),
            Message("user", "Q"),
            Message("assistant", "R", ""),
        )
    ),
    "odd thoughts": Conversation(
        (
            Message("user", "Q"),
            Message("assistant", "a<think>x<think>y</think>b</think>\n\nc<think>d"),
            Message("user", "<think>Q</think>"),
            Message("assistant", "<think>\n\n</think>\n\n\nR"),
        )
    ),
    "tools": Conversation(
        (
            Message("user", "Q"),
            Message("assistant", "", tool_calls=CALLS),
            Message("tool", '{"sum": 3}'),
            Message("tool", "0"),
            Message("assistant", "I see\n", tool_calls=CALLS[:1]),
            Message("tool", "4"),
            Message("assistant", "<think>\nT\n</think>\n\n", tool_calls=CALLS),
            Message("tool", "5"),
            Message("assistant", "Four."),
            Message("user", "Thanks"),
            Message("assistant", "Welcome", "polite"),
        ),
        system="S",
        tools=(TOOL, {"name": "zero"}),
    ),
    "tools alone": Conversation((Message("user", "Q"), Message("assistant", "R")), tools=(TOOL,)),
}


def as_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form, as a server is asked."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(message)
    return messages


def rendered(tokenizer: Any, conversation: Conversation, number: int | None = None, **options: Any) -> str:
    first = 0 if conversation.system is None else 1
    messages = as_messages(conversation)[: None if number is None else first + number]
    tools = list(conversation.tools) or None
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("default_system", [None, 'Say "é😀" {{ %} @TOOLS_AFTER@\\n\n'])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_it_renders_what_was_trained(
    name: str, default_system: str | None, enable_thinking: bool | None
) -> None:
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {"enable_thinking": enable_thinking, "default_system": default_system}
    template = build_template("qwen3", tokenizer, **options)
    (turns,) = template.encode(CONVERSATIONS[name])
    tokenizer.chat_template = exported_chat_template("qwen3", **options)
    conversation = CONVERSATIONS[name]
    given: list[int] = []
    replies = [number for number, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    for number, (prompt, reply, *_) in zip(replies, turns, strict=True):
        # null gives the empty thought to replies without one only, which a prompt cannot know
        thinking = enable_thinking is not False and not tokenizer.decode(prompt).endswith("</think>\n\n")
        asked = {} if enable_thinking is not None else {"enable_thinking": thinking}
        before = rendered(tokenizer, conversation, number, add_generation_prompt=True, **asked)
        assert before == tokenizer.decode(given + prompt)
        given += prompt + reply
        assert rendered(tokenizer, conversation, number + 1) == tokenizer.decode(given)
    assert tokenizer(rendered(tokenizer, conversation), add_special_tokens=False)["input_ids"] == given


def test_the_asker_decides_about_thoughts() -> None:
    tokenizer = byte_tokenizer()
    for trained in (True, False):
        tokenizer.chat_template = exported_chat_template("qwen3", enable_thinking=trained)
        for asked in (True, False):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": "Q"}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=asked,
            )
            header = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            assert prompt == header + ("" if asked else "<think>\n\n</think>\n\n")


def test_arguments_as_text_are_written_as_they_are() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = exported_chat_template("qwen3")
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        tokenize=False,
    )
    assert text.endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    )


def test_the_tokenizer_s_own_template_needs_none() -> None:
    assert exported_chat_template(None) is None
