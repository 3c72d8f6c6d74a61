"""Replies that the families' templates write come apart into what they were written from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import FAMILIES, family_template, family_tokenizer
from support.tokenizers import byte_tokenizer

from shardyard.data.templates.render import Renderer
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.infer.replies import (
    CallFormat,
    Reply,
    ReplyFormat,
    ReplyParser,
    find_reply_format,
    parse_reply,
)
from shardyard.infer.replies.parser import joined

CALLS = (
    ToolCall("weather", {"city": '北京 "x"', "n": [1, None], "deep": {"a": "</think>}{"}, "text": "21"}),
    ToolCall("now", {}),
)
_TEXT = {"type": "object", "properties": {"city": {"type": "string"}, "text": {"type": "string"}}}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": _TEXT}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
)
THINKS = {"qwen3", "glm4", "qwen3_5_think"}
CALLERS = {
    "qwen2.5": 2, "qwen3": 2, "qwen3_instruct_2507": 2, "glm4": 2, "deepseek3": 2, "llama3.1": 1,
    "qwen3_5_think": 2,
}  # fmt: skip
"""Families that write calls, and the most in a reply."""
HERMES = ReplyFormat(CallFormat("json", open="<tool_call>", close="</tool_call>", joint="\n"))


@cache
def renderer_of(name: str, enable_thinking: bool | None = None) -> Renderer:
    if name in FAMILIES:
        return Renderer(family_tokenizer(name), enable_thinking)
    return Renderer(byte_tokenizer(family_template(name)), enable_thinking)


def written(name: str, turn: Message, enable_thinking: bool | None = None) -> tuple[str, str]:
    """The prompt, and the reply that the template writes behind it, without the mark of its end."""
    renderer = renderer_of(name, enable_thinking)
    tools = TOOLS if name != "deepseek3" else ()
    conversation = Conversation((Message("user", "Q"), turn), None, tools)
    prompt = renderer.render(conversation, 1, generation_prompt=True)
    text = renderer.render(conversation, 2)
    if name == "deepseek3":
        prompt = prompt.removesuffix("<think>\n")  # which its own replies do not follow
    assert text.startswith(prompt)
    text = text[len(prompt) :]
    for end in ("<|im_end|>\n", "<|eot_id|>", "<｜end▁of▁sentence｜>"):
        text = text.removesuffix(end)
    return prompt, text


def in_pieces(text: str, form: ReplyFormat, size: int, **options: Any) -> Reply:
    parser = ReplyParser(form, **options)
    deltas = [d for start in range(0, len(text), size) for d in parser.feed(text[start : start + size])]
    return joined([*deltas, *parser.flush()])


@pytest.mark.parametrize("reasoning", [None, "First\n\nthis."])
@pytest.mark.parametrize("said", ["", "Let me see.", '{"a": 1}\n<tool x'])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(CALLERS))
def test_what_a_template_writes_is_read_back(
    name: str, number: int, said: str, reasoning: str | None
) -> None:
    number = min(number, CALLERS[name])
    if not (said or number) or (reasoning and name not in THINKS):
        said, reasoning = said or "Yes.", None
    if name == "llama3.1" and number:
        said = ""  # its template leaves words beside a call out
    turn = Message("assistant", said, reasoning, CALLS[:number])
    prompt, text = written(name, turn)
    form = find_reply_format(renderer_of(name))
    opened = form.opens_thought(prompt)
    wanted = Reply(reasoning, said, CALLS[:number])
    assert parse_reply(text, form, tools=TOOLS, in_thought=opened) == wanted
    for size in (1, 3, 7):
        assert in_pieces(text, form, size, tools=TOOLS, in_thought=opened) == wanted


def test_thoughts_that_the_prompt_opens_or_closes() -> None:
    form = find_reply_format(renderer_of("qwen3_5_think"))
    assert form.opens_thought("<|im_start|>assistant\n<think>\n")
    assert parse_reply("why\n</think>\n\nYes.", form, in_thought=True) == Reply("why", "Yes.")
    assert parse_reply("<think>\nwhy\n</think>\n\nYes.", form, in_thought=True) == Reply("why", "Yes.")
    assert not form.opens_thought("<think>\n\n</think>\n\n")
    assert parse_reply("Yes.", form) == Reply(None, "Yes.")
    assert form.is_inside_thought("<think>\nwhy") and not form.is_inside_thought("<think>a</think>b")


def test_a_thought_that_is_cut_is_a_thought() -> None:
    assert parse_reply("<think>\nand then</thi", HERMES) == Reply("and then</thi", "")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": NaN}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        "<tool_call>",
        "a <tool_cal",
        "a  \n",
        "Use <think> and </think> so.",
    ],
)
def test_what_cannot_be_read_is_content(text: str) -> None:
    assert parse_reply(text, HERMES) == Reply(None, text)
    assert in_pieces(text, HERMES, 1) == Reply(None, text)


def test_calls_after_one_that_is_none_are_read() -> None:
    text = '<tool_call>{]</tool_call> <tool_call>{"name": "f"}</tool_call>'
    assert parse_reply(text, HERMES) == Reply(None, "<tool_call>{]</tool_call> ", (ToolCall("f", {}),))


def test_the_mark_inside_an_argument() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert parse_reply(text, HERMES).tool_calls == (ToolCall("f", {"a": "</tool_call>"}),)


def test_calls_stay_in_the_content_where_nobody_asked_for_them() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse_reply(text, HERMES, reads_calls=False) == Reply(None, text)


def test_bare_json_is_a_call_of_a_tool_only() -> None:
    form = find_reply_format(renderer_of("llama3.1"))
    call = '{"name": "now", "parameters": {}}'
    assert parse_reply(call, form, tools=TOOLS) == Reply(None, "", (CALLS[1],))
    assert parse_reply(call + "; " + call, form, tools=TOOLS).tool_calls == (CALLS[1], CALLS[1])
    for text in ('{"name": "Ann", "parameters": {}}', '{"a": 1}', "[1](x)", "{"):
        assert parse_reply(text, form, tools=TOOLS) == Reply(None, text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (
            '[TOOL_CALLS] [{"name": "now", "arguments": {}},'
            ' {"name": "weather", "arguments": {"city": "a"}}]',
            CallFormat("json", open="[TOOL_CALLS]"),
        ),
        (
            'Action: now\nAction Input: {}\nAction: weather\nAction Input: {"city": "a"}',
            CallFormat("named", open="Action:", middle="Action Input:"),
        ),
    ],
)
def test_forms_of_other_models(text: str, form: CallFormat) -> None:
    wanted = Reply(None, "", (ToolCall("now", {}), ToolCall("weather", {"city": "a"})))
    for size in (1, 5, 1000):
        assert in_pieces(text, ReplyFormat(form), size) == wanted


@cache
def form_of(name: str) -> ReplyFormat:
    return find_reply_format(renderer_of(name))


@pytest.mark.parametrize("name", ["qwen3", "glm4", "deepseek3", "llama3.1", "qwen3_5_think"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces(name: str, data: st.DataObject) -> None:
    form = form_of(name)
    words = [*form.marks, "{", "}", '"', "now", "\n", " ", "<", '{"name": "now", "parameters": {}}', "x", "]"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    opened = data.draw(st.booleans())
    whole = parse_reply(text, form, tools=TOOLS, in_thought=opened)
    for size in (1, 2, data.draw(st.integers(3, 9))):
        assert in_pieces(text, form, size, tools=TOOLS, in_thought=opened) == whole
    thinks = opened or text.lstrip().startswith(form.thought[0])
    if not thinks and not whole.tool_calls:
        assert whole.content == text  # nothing is lost


def test_many_beginnings_of_calls_are_no_more_work() -> None:
    """A model in a loop: after some beginnings that are none the rest is content, unread."""
    text = '<tool_call>{"' * 20_000
    assert parse_reply(text, HERMES) == Reply(None, text)
