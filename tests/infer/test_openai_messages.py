"""Messages in OpenAI's form -> conversations, and the field that is at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.infer.openai_messages import ChatFault, from_openai, to_openai

USER = {"role": "user", "content": "Q"}
BAD_ARGUMENTS = (
    "{", "3", "NaN", None, [], '{"a": Infinity}', '{"a":' * 70 + "1" + "}" * 70, "[" * 9999,
)  # fmt: skip


def call(call_id: str | None, name: str = "f", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(call_id, call_id) for call_id in ids]}


def result(call_id: str | None, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def test_every_role() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "developer", "content": [part("Be "), part("brief.")]},
        USER | {"name": "Ann"},
        {
            "role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "audio": None,
            "annotations": [], "function_call": None, "tool_calls": [call("a", "f", '{"x": [1, null]}')],
        },
        result("a"),
        {"role": "assistant", "content": "Done.", "tool_calls": None},
    ]  # fmt: skip
    wanted = Conversation(
        (
            Message("user", "Q"),
            Message("assistant", "", "hm", (ToolCall("f", {"x": [1, None]}),)),
            Message("tool", "r"),
            Message("assistant", "Done."),
        ),
        "Be brief.",
        tuple(tools),
    )
    assert from_openai(messages, tools) == wanted
    assert from_openai(json.loads(json.dumps(to_openai(wanted))), tools) == wanted


def test_results_come_into_the_order_of_their_calls() -> None:
    found = from_openai([USER, calls("a", "b"), result("b", "2"), result("a", "1")])
    assert [turn.content for turn in found.turns[2:]] == ["1", "2"]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([USER | {"name": 3}], "messages[0].name"),
        ([USER | {"colour": "red"}], "messages[0].colour"),
        ([USER, {"role": "system", "content": "S"}], "messages[1].role"),
        ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
        (
            [USER, {"role": "assistant", "content": "a", "reasoning_content": 1}],
            "messages[1].reasoning_content",
        ),
        ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": [1]}], "messages[1].tool_calls[0]"),
        ([USER, {"role": "assistant", "tool_calls": [{"type": "x"}]}], "messages[1].tool_calls[0].type"),
        ([USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        (
            [USER, {"role": "assistant", "tool_calls": [call("a", "")]}],
            "messages[1].tool_calls[0].function.name",
        ),
        *(
            (
                [USER, {"role": "assistant", "tool_calls": [call("a", "f", arguments)]}],
                "messages[1].tool_calls[0].function.arguments",
            )
            for arguments in BAD_ARGUMENTS
        ),
        ([USER, result("a")], "messages[1].role"),
        ([USER, calls("a"), result("b")], "messages[2].tool_call_id"),
        ([USER, calls("a", "b"), result("a"), result("a")], "messages[3].tool_call_id"),
        ([USER, calls("a"), result("a"), result("a")], "messages[3].role"),
        ([USER, calls("a", "b"), result("a"), USER], "messages[2]"),
    ],
)
def test_a_fault_names_its_field(messages: Any, field: str) -> None:
    with pytest.raises(ChatFault) as caught:
        from_openai(messages)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ") and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({}, "tools"),
        ([1], "tools[0]"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function", "function": 1}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"name": "f", "description": 1}], "tools[0].description"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ],
)
def test_a_fault_of_a_tool_names_its_field(tools: Any, field: str) -> None:
    with pytest.raises(ChatFault) as caught:
        from_openai([USER], tools)
    assert caught.value.field == field
