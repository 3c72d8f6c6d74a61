"""The named template qwen3: its text as the reference writes it, and what of it is trained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import byte_tokenizer, trained_text

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

EMPTY = "<think>\n\n</think>\n\n"


def encode(conversation: Conversation, **options: Any) -> tuple[str, list[str]]:
    """The whole text of the sample, and its trained stretches."""
    tokenizer = byte_tokenizer()
    samples = Encoder(tokenizer, template="qwen3", **options).encode(conversation)
    assert not isinstance(samples, Dropped), samples
    (sample,) = samples
    return tokenizer.decode(sample.input_ids), trained_text(tokenizer, samples)[0]


def talk(*replies: Message | str, **fields: Any) -> Conversation:
    turns: list[Message] = []
    for number, reply in enumerate(replies, start=1):
        turns.append(Message("user", f"Q{number}"))
        turns.append(reply if isinstance(reply, Message) else Message("assistant", reply))
    return Conversation(tuple(turns), **fields)


def test_one_turn_without_system() -> None:
    text, trained = encode(talk("R"))
    assert text == f"<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n{EMPTY}R<|im_end|>\n"
    assert trained == [f"{EMPTY}R<|im_end|>\n"]


def test_a_system_message_and_several_turns() -> None:
    text, trained = encode(talk("R1", "R2", "R3", system="S"))
    assert text == "<|im_start|>system\nS<|im_end|>\n" + "".join(
        f"<|im_start|>user\nQ{i}<|im_end|>\n<|im_start|>assistant\n{EMPTY}R{i}<|im_end|>\n" for i in (1, 2, 3)
    )
    assert trained == [f"{EMPTY}R{i}<|im_end|>\n" for i in (1, 2, 3)]


THOUGHT = "<think>\nwhy\n</think>\n\nR"


@pytest.mark.parametrize(
    ("enable_thinking", "reply", "given", "trained"),
    [
        (True, "R", "", f"{EMPTY}R"),
        (True, THOUGHT, "", THOUGHT),
        (True, "why</think>R", "", "why</think>R"),
        (False, "R", EMPTY, "R"),
        (False, THOUGHT, EMPTY, "R"),
        (False, "a<think>x</think>b<think>y</think>c", EMPTY, "abc"),
        (None, "R", EMPTY, "R"),
        (None, THOUGHT, "", THOUGHT),
    ],
)
def test_thoughts(enable_thinking: bool | None, reply: str, given: str, trained: str) -> None:
    text, stretches = encode(talk(reply, "last"), enable_thinking=enable_thinking)
    assert stretches[0] == f"{trained}<|im_end|>\n"
    assert text.startswith(
        f"<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n{given}{trained}<|im_end|>\n"
    )


def test_reasoning_given_apart_equals_the_same_thought_inline() -> None:
    apart = talk(Message("assistant", "R", "why"))
    for enable_thinking in (True, False, None):
        assert encode(apart, enable_thinking=enable_thinking) == encode(
            talk(THOUGHT), enable_thinking=enable_thinking
        )


TOOL = {"name": "f", "description": "天气", "parameters": {"type": "object"}}
CALL = ToolCall("f", {"city": "北京", "n": [1, None]})
TOOL_TALK = Conversation(
    (
        Message("user", "Q"),
        Message("assistant", "", tool_calls=(CALL, CALL)),
        Message("tool", "X"),
        Message("tool", "Y"),
        Message("assistant", "R"),
    ),
    "S",
    (TOOL, {"name": "g"}),
)
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"city": "北京", "n": [1, null]}}\n</tool_call>'


@pytest.mark.parametrize(("enable_thinking", "given", "own"), [(True, "", EMPTY), (False, EMPTY, "")])
def test_tools_calls_and_results(enable_thinking: bool, given: str, own: str) -> None:
    text, trained = encode(TOOL_TALK, enable_thinking=enable_thinking)
    assert text == (
        "<|im_start|>system\nS\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"name": "f", "description": "天气", "parameters": {"type": "object"}}\n{"name": "g"}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{given}{own}{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nX\n</tool_response>\n<tool_response>\nY\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{given}{own}R<|im_end|>\n"
    )
    assert trained == [f"{own}{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n", f"{own}R<|im_end|>\n"]


def test_a_call_after_words_or_a_thought_stands_on_its_own_line() -> None:
    one = ToolCall("f", {})
    line = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
    for content, reasoning, expected in [
        ("Let me see.", None, f"{EMPTY}Let me see.\n{line}"),
        ("<think>\nw\n</think>\n\n", None, f"<think>\nw\n</think>\n\n{line}"),
        ("", "w", f"<think>\nw\n</think>\n\n{line}"),
        ("Hm.", "w", f"<think>\nw\n</think>\n\nHm.\n{line}"),
    ]:
        reply = Message("assistant", content, reasoning, (one,))
        conversation = Conversation(
            (Message("user", "Q"), reply, Message("tool", "X"), Message("assistant", "R"))
        )
        assert encode(conversation)[1][0] == expected


def test_tools_without_a_system_message_stand_in_one_of_their_own() -> None:
    conversation = Conversation((Message("user", "Q"), Message("assistant", "R")), tools=(TOOL,))
    assert encode(conversation)[0].startswith("<|im_start|>system\n\n\n# Tools\n\n")


def test_the_default_system_message() -> None:
    assert encode(talk("R"), default_system="D")[0].startswith(
        "<|im_start|>system\nD<|im_end|>\n<|im_start|>user"
    )
    assert encode(talk("R", system="S"), default_system="D")[0].startswith(
        "<|im_start|>system\nS<|im_end|>\n"
    )
    assert encode(talk("R"), default_system="")[0].startswith("<|im_start|>user")


def test_a_reply_that_is_only_a_thought_is_dropped_when_thoughts_are_removed() -> None:
    conversation = talk("<think>x</think>", where="f:3")
    outcome = Encoder(byte_tokenizer(), template="qwen3", enable_thinking=False).encode(conversation)
    assert isinstance(outcome, Dropped) and outcome.where == "f:3" and "but a thought" in outcome.reason


def test_the_end_of_turn_becomes_the_tokenizers_eos() -> None:
    tokenizer = byte_tokenizer()
    Encoder(tokenizer, template="qwen3")
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("missing", ["<|im_start|>", "<|im_end|>"])
def test_a_tokenizer_without_the_templates_tokens_is_refused(missing: str) -> None:
    tokenizer = byte_tokenizer(special=tuple({"<|im_start|>", "<|im_end|>"} - {missing}), eos=None)
    with pytest.raises(UserError, match="qwen3 needs the tokens"):
        Encoder(tokenizer, template="qwen3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "qwen33"}, "'qwen33' is not a template; did you mean qwen3?"),
        ({"template": "qwen3", "tool_format": "defualt"}, "data.tool_format: 'defualt' is not a tool format"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Encoder(byte_tokenizer(), **options)  # type: ignore[arg-type]


WORDS = st.text(st.sampled_from("ab tin\n\r <|>é中\u2028😀"), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from([True, False, None]))
def test_ids_are_those_of_the_text_and_the_mask_is_the_replies(
    pairs: list[tuple[str, str]], enable_thinking: bool | None
) -> None:
    tokenizer = byte_tokenizer()
    turns = [turn for q, r in pairs for turn in (Message("user", q), Message("assistant", r))]
    samples = Encoder(tokenizer, template="qwen3", enable_thinking=enable_thinking).encode(
        Conversation(tuple(turns))
    )
    assert not isinstance(samples, Dropped)
    given_thought, own_thought = ("", EMPTY) if enable_thinking else (EMPTY, "")
    replies = [r.lstrip("\n") if enable_thinking is False else r for _, r in pairs]
    text = "".join(
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{given_thought}{own_thought}{r}<|im_end|>\n"
        for (q, _), r in zip(pairs, replies, strict=True)
    )
    assert tokenizer.decode(samples[0].input_ids) == text
    assert trained_text(tokenizer, samples) == [[f"{own_thought}{r}<|im_end|>\n" for r in replies]]
    if not any(r.startswith("\n") for r in replies):  # else the reply's line end and the prompt's would merge
        assert samples[0].input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
