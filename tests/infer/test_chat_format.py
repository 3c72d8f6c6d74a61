"""Prompts are those of the families' templates, id for id, and those that training gave."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from support.families import FAMILIES, as_messages, family_template, family_tokenizer, plain_talk
from support.tokenizers import CHATML, CHATML_WITHOUT_PROMPT, INSTRUCTION, byte_tokenizer

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError
from shardyard.infer.chat_format import ChatFormat
from shardyard.infer.openai_messages import ChatFault

NAMES = [*sorted(FAMILIES), "qwen3", "qwen3_5_think"]
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
TURNS_ENDED = {"qwen2.5": 2, "llama3": 1, "gemma3": 0}
"""How often the eos token stands in a prompt of one question; Qwen has a system message of its own."""
CALLED = (
    Message("user", "Q"),
    Message("assistant", "", tool_calls=(ToolCall("f", {"city": "北京"}), ToolCall("f", {}))),
    Message("tool", "1"),
    Message("tool", "2"),
)


@cache
def tokenizer_of(name: str) -> Any:
    if name in FAMILIES:
        return family_tokenizer(name)
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    return byte_tokenizer(family_template(name), special=special, eos="<|im_end|>")


@cache
def format_of(name: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(name))


def own_ids(name: str, conversation: Conversation, **options: Any) -> list[int]:
    as_text = name in FAMILIES and FAMILIES[name].arguments_as_text
    options = {"add_generation_prompt": True} | options
    return tokenizer_of(name).apply_chat_template(
        as_messages(conversation, arguments_as_text=as_text), tools=list(conversation.tools) or None,
        return_dict=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_a_talk(name: str, system: str | None) -> None:
    for turns in (1, 2, 3):
        talk = plain_talk(turns, system)
        asked = Conversation(talk.turns[:-1], system)
        if name == "gemma" and system:
            with pytest.raises(ChatFault, match="System role not supported") as caught:
                format_of(name).ids(asked)
            assert caught.value.field == "messages"
            continue
        assert format_of(name).ids(asked) == own_ids(name, asked)


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "glm4", "deepseek3", "qwen3_5_think"])
def test_prompts_behind_results(name: str, thinking: bool | None) -> None:
    asked = Conversation(CALLED, "S", () if name == "deepseek3" else TOOLS)
    options = {} if thinking is None else {"enable_thinking": thinking}
    prompt = format_of(name).prompt(asked, enable_thinking=thinking)
    assert prompt.ids == own_ids(name, asked, **options)
    assert prompt.in_thought == prompt.text.endswith("<think>\n")
    assert ChatFormat(tokenizer_of(name), enable_thinking=thinking).ids(asked) == prompt.ids


@pytest.mark.parametrize("words", ["The", "The ", "The\n", "<think>\nSo"])
@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "glm4", "phi3", "qwen3"])
def test_a_reply_is_gone_on_with(name: str, words: str) -> None:
    asked = Conversation((Message("user", "Q"), Message("assistant", words)))
    own = own_ids(name, asked, add_generation_prompt=False, continue_final_message=True)
    prompt = format_of(name).prompt(asked, continue_final=True)
    assert prompt.ids == own
    assert prompt.in_thought == words.startswith("<think>")


def test_what_cannot_be_gone_on_with() -> None:
    for turns in ((), CALLED, CALLED[:2]):
        with pytest.raises(ChatFault, match="last message"):
            format_of("qwen2.5").ids(Conversation(turns), continue_final=True)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "gemma3"])
def test_prompts_are_those_of_the_training(name: str, split: bool) -> None:
    """With special tokens in the words of a user, who must not end his turn by them."""
    tokenizer = tokenizer_of(name)
    text = f"a{tokenizer.eos_token} b"
    talk = Conversation((Message("user", text), Message("assistant", "c")))
    encoder = Encoder(tokenizer, cutoff_len=10**6, split_special_tokens=split, enable_thinking=None)
    samples = encoder.encode(talk)
    assert not isinstance(samples, Dropped)
    trained = samples[0].input_ids.tolist()
    ids = ChatFormat(tokenizer, split_special_tokens=split).ids(Conversation(talk.turns[:1]))
    assert trained[: len(ids)] == ids
    assert ids.count(tokenizer.eos_token_id) == TURNS_ENDED[name] + (not split)


def test_a_template_without_a_generation_prompt_gets_the_header_of_replies() -> None:
    asked = Conversation((Message("user", "Q"),))
    bare = ChatFormat(byte_tokenizer(CHATML_WITHOUT_PROMPT)).ids(asked)
    assert bare == ChatFormat(byte_tokenizer(CHATML)).ids(asked)
    own = byte_tokenizer(INSTRUCTION)
    assert own.decode(ChatFormat(own).ids(asked)) == "<s>[INST] Q [/INST]"


def test_faults_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"no chat template.*shardyard generate"):
        ChatFormat(byte_tokenizer())
    with pytest.raises(UserError, match="cannot be used"):
        ChatFormat(byte_tokenizer("{% if %}"))
    with pytest.raises(ChatFault, match=r"tools: .*does not show tools"):
        format_of("phi3").ids(Conversation(CALLED[:1], tools=TOOLS))
    with pytest.raises(ChatFault, match="does not write function calls"):
        format_of("phi3").ids(Conversation(CALLED))
    with pytest.raises(ChatFault, match="surrogate"):
        format_of("qwen2.5").ids(Conversation((Message("user", "\ud800"),)))


def test_a_hostile_template_is_stopped() -> None:
    hostile = "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="stopped"):
        ChatFormat(byte_tokenizer(hostile)).ids(Conversation((Message("user", "Q"),)))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2.5", {"<|im_end|>"}),
        ("llama3", {"<|eot_id|>"}),
        ("gemma3", {"<end_of_turn>"}),
        ("phi3", {"<|end|>"}),
        ("glm4", {"<|user|>", "<|observation|>"}),
    ],
)
def test_answers_end_where_the_template_ends_replies(name: str, ends: set[str]) -> None:
    tokenizer = tokenizer_of(name)
    assert format_of(name).stop_ids == {tokenizer.convert_tokens_to_ids(end) for end in ends}
    assert format_of(name).stop_texts == ()


def test_a_mark_that_is_no_token_is_looked_for_in_the_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardyard.infer"):
        found = ChatFormat(byte_tokenizer(CHATML, special=("<s>", "</s>"), eos="</s>"))
    assert (found.stop_ids, found.stop_texts) == (frozenset(), ("<|im_end|>",))
    assert "is no token of this tokenizer" in caplog.text


def test_the_system_message_of_the_training_stands_in_for_none() -> None:
    tokenizer = tokenizer_of("llama3")
    asked = Conversation((Message("user", "Q"),))
    form = ChatFormat(tokenizer, default_system="Be brief.")
    assert form.ids(asked) == format_of("llama3").ids(Conversation(asked.turns, "Be brief."))
    assert form.ids(Conversation(asked.turns, "S")) == format_of("llama3").ids(Conversation(asked.turns, "S"))
