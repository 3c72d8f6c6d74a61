"""``data.template: null`` with the families' real chat templates: their ids, and every reply trained once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.families import FAMILIES, as_messages, family_template, family_tokenizer, plain_talk
from support.tokenizers import byte_tokenizer, trained_text

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.types import Conversation, Message, ToolCall

TOOLS = ({"name": "f", "description": "天 <b>", "parameters": {"type": "object", "properties": {}}},)
CALLS = (ToolCall("f", {"city": "北京", "n": [1, None]}), ToolCall("f", {}))
QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
NAMES = [*sorted(FAMILIES), "qwen3", "qwen3_instruct_2507"]


@cache
def tokenizer_of(name: str) -> Any:
    if name in FAMILIES:
        return family_tokenizer(name)
    return byte_tokenizer(family_template(name), special=QWEN, eos="<|im_end|>")


@cache
def encoder_of(name: str, enable_thinking: bool | None) -> Encoder:
    return Encoder(tokenizer_of(name), cutoff_len=10**6, enable_thinking=enable_thinking)


def check(name: str, conversation: Conversation, enable_thinking: bool | None = None) -> list[list[str]]:
    """What is trained; every sample's ids are the family's own of the turns up to its last reply."""
    samples = encoder_of(name, enable_thinking).encode(conversation)
    assert not isinstance(samples, Dropped), samples
    tokenizer = tokenizer_of(name)
    trained = trained_text(tokenizer, samples)
    replies = [number for number, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    as_text = name in FAMILIES and FAMILIES[name].arguments_as_text
    done = 0
    for sample, stretches in zip(samples, trained, strict=True):
        done += len(stretches)
        shown = replace(conversation, turns=conversation.turns[: replies[done - 1] + 1])
        own = tokenizer.apply_chat_template(
            as_messages(shown, arguments_as_text=as_text),
            tools=list(conversation.tools) or None,
            return_dict=False,
            **options,
        )
        assert sample.input_ids.tolist() == own
    assert done == len(replies)
    return trained


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_plain_turns(name: str, turns: int, system: str | None) -> None:
    conversation = plain_talk(turns, system)
    if name == "gemma" and system:
        outcome = encoder_of(name, None).encode(conversation)
        assert isinstance(outcome, Dropped) and "System role not supported" in outcome.reason
        return
    trained = [text for stretches in check(name, conversation) for text in stretches]
    words = [turn.content.strip() for turn in conversation.turns if turn.role == "assistant"]
    assert len(trained) == turns and all(word in text for word, text in zip(words, trained, strict=True))


@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("said", ["", "Let me see."])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "glm4"])
def test_calls_and_results(name: str, number: int, said: str, enable_thinking: bool | None) -> None:
    turns = (
        Message("user", "Q"),
        Message("assistant", said, tool_calls=CALLS[:number]),
        *(Message("tool", f"X{i}") for i in range(number)),
        Message("assistant", "R"),
    )
    trained = check(name, Conversation(turns, "S", TOOLS), enable_thinking)
    assert sum(text.count("</tool_call>") for text in trained[0]) == number


@pytest.mark.parametrize("enable_thinking", [True, None])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_thoughts(name: str, turns: int, apart: bool, enable_thinking: bool | None) -> None:
    messages: list[Message] = []
    for n in range(turns):
        reply = Message("assistant", f"R{n}", f"why {n}") if apart else None
        reply = reply or Message("assistant", f"<think>\nwhy {n}\n</think>\n\nR{n}")
        messages += [Message("user", f"Q{n}"), reply]
    trained = check(name, Conversation(tuple(messages)), enable_thinking)
    assert len(trained) == turns  # earlier thoughts go, so every reply has its own sample
    assert all(f"why {n}" in texts[0] and f"R{n}" in texts[0] for n, texts in enumerate(trained))
