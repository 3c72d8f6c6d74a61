"""Named templates against the families' own chat templates, id for id, and what is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import FAMILIES, as_messages, family_tokenizer, plain_talk
from support.tokenizers import trained_text

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.types import Conversation, Message, ToolCall

NAMES = sorted(FAMILIES)
TRIMS = {"llama3", "llama3.1", "gemma", "gemma3", "glm4"}
"""Families that take the outer white space off a reply."""

END = {
    "qwen2.5": "<|im_end|>\n",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "deepseek3": "<｜end▁of▁sentence｜>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "glm4": "",
    "gemma": "<end_of_turn>\n",
    "gemma3": "<end_of_turn>\n",
    "phi3": "<|end|>\n",
}
"""What each family writes after a reply; GLM ends one with the next turn's marker, the last one unwritten."""

LAST = {"phi3": "<|endoftext|>"}
"""What it writes after the last reply besides."""

TOOLS = (
    {"name": "f", "description": "天 <b> & 'c'", "parameters": {"type": "object", "properties": {}}},
    {"type": "function", "function": {"name": "g", "parameters": None}},
)
CALLS = (ToolCall("f", {"city": "北京", "n": [1, None]}), ToolCall("g", {}))


@cache
def tokenizer_of(name: str) -> Any:
    return family_tokenizer(name)


@cache
def encoder_of(name: str, enable_thinking: bool | None = True) -> Encoder:
    return Encoder(tokenizer_of(name), template=name, cutoff_len=10**6, enable_thinking=enable_thinking)


@cache
def untouched_tokenizer_of(name: str) -> Any:
    """One whose eos token no template of ours has set."""
    return family_tokenizer(name)


def own_ids(name: str, conversation: Conversation, **options: Any) -> list[int]:
    return untouched_tokenizer_of(name).apply_chat_template(
        as_messages(conversation, arguments_as_text=FAMILIES[name].arguments_as_text),
        tools=list(conversation.tools) or None,
        return_dict=False,
        **options,
    )


def encoded(name: str, conversation: Conversation, enable_thinking: bool | None = True) -> Any:
    samples = encoder_of(name, enable_thinking).encode(conversation)
    assert not isinstance(samples, Dropped), samples
    return samples


def ended(name: str, replies: list[str]) -> list[str]:
    """The replies as they are trained, in one sample."""
    texts = [reply.strip() if name in TRIMS else reply for reply in replies]
    if name == "glm4":
        texts = [f"\n<think></think>\n{text}<|user|>" for text in texts]
    return [text + END[name] for text in texts[:-1]] + [texts[-1] + END[name] + LAST.get(name, "")]


@pytest.mark.parametrize("system", [None, "Be brief. \n"])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_plain_turns(name: str, turns: int, system: str | None) -> None:
    conversation = plain_talk(turns, system)
    if name == "gemma" and system:
        reason = "the template gemma has no place for a system message"
        assert encoder_of(name).encode(conversation) == Dropped(reason, "")
        return
    samples = encoded(name, conversation)
    assert [sample.input_ids.tolist() for sample in samples] == [own_ids(name, conversation)]
    replies = [turn.content for turn in conversation.turns if turn.role == "assistant"]
    assert trained_text(tokenizer_of(name), samples) == [ended(name, replies)]


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tools_are_listed_as_the_family_lists_them(name: str, number: int, system: str | None) -> None:
    conversation = plain_talk(2, system, tools=TOOLS[:number])
    if name not in ("qwen2.5", "llama3.1", "glm4"):
        assert encoder_of(name).encode(conversation) == Dropped(
            f"the template {name} does not show tools to the model", ""
        )
        return
    samples = encoded(name, conversation)
    assert [sample.input_ids.tolist() for sample in samples] == [own_ids(name, conversation)]
    assert trained_text(tokenizer_of(name), samples) == [ended(name, ["The Rhine.", "It is long.\n"])]


WRITTEN = {
    "qwen2.5": [
        '<tool_call>\n{"name": "f", "arguments": {"city": "北京", "n": [1, null]}}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ],
    "llama3.1": ['{"name": "f", "parameters": {"city": "北京", "n": [1, null]}}'],
    "deepseek3": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"city": "北京", "n": [1, null]}\n```<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>",
    ],
    "glm4": [
        "\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>北京</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>[1, null]</arg_value>\n</tool_call>",
        "\n<tool_call>g\n</tool_call>",
    ],
}
"""Each family's text of the two calls; Llama writes one call in a reply."""


def expected_call(name: str, number: int, said: str) -> str:
    """The trained text of a reply that says ``said`` and makes ``number`` calls."""
    calls = WRITTEN[name][:number]
    if name == "qwen2.5":
        return said + "\n" * bool(said) + "\n".join(calls) + END[name]
    if name == "deepseek3":
        return f"{said}<｜tool▁calls▁begin｜>" + "\n".join(calls) + f"<｜tool▁calls▁end｜>{END[name]}"
    if name == "glm4":
        return "\n<think></think>" + f"\n{said}" * bool(said) + "".join(calls) + "<|observation|>"
    return calls[0] + END[name]


@pytest.mark.parametrize("system", [None, "S"])
@pytest.mark.parametrize("said", ["", "Let me see."])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_and_results(name: str, number: int, said: str, system: str | None) -> None:
    turns = (
        Message("user", "Weather?"),
        Message("assistant", said, tool_calls=CALLS[:number]),
        *(Message("tool", f'{{"t": {i}}}') for i in range(number)),
        Message("assistant", "It is 21."),
        Message("user", "Thanks"),
        Message("assistant", "Bye"),
    )
    conversation = Conversation(turns, system, () if name == "deepseek3" else TOOLS)
    if name == "llama3.1" and (number > 1 or said):
        outcome = encoder_of(name).encode(conversation)
        assert isinstance(outcome, Dropped)
        assert ("at most 1 function call" in outcome.reason) or ("words beside" in outcome.reason)
        return
    samples = encoded(name, conversation)
    assert [sample.input_ids.tolist() for sample in samples] == [own_ids(name, conversation)]
    first = expected_call(name, number, said)
    assert trained_text(tokenizer_of(name), samples) == [[first, *ended(name, ["It is 21.", "Bye"])]]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "glm4"])
def test_calls_in_several_rounds(name: str) -> None:
    turns = [Message("user", "Q")]
    for i in (0, 1, 0):
        turns += [Message("assistant", "", tool_calls=CALLS[i : i + 1]), Message("tool", "X")]
    conversation = Conversation((*turns, Message("assistant", "R")), None, TOOLS)
    samples = encoded(name, conversation)
    assert [sample.input_ids.tolist() for sample in samples] == [own_ids(name, conversation)]
    assert [len(stretches) for stretches in trained_text(tokenizer_of(name), samples)] == [4]


@pytest.mark.parametrize("name", ["llama3", "deepseek_r1", "gemma", "gemma3", "phi3"])
def test_calls_and_results_that_a_family_does_not_write_drop_the_row(name: str) -> None:
    called = (
        Message("user", "Q"),
        Message("assistant", "", tool_calls=CALLS[:1]),
        Message("tool", "X"),
        Message("assistant", "R"),
    )
    outcome = encoder_of(name).encode(Conversation(called, where="f:1"))
    assert outcome == Dropped(f"the template {name} does not write function calls", "f:1")
    results = Conversation((called[0], Message("assistant", "a"), *called[2:]), where="f:1")
    assert encoder_of(name).encode(results) == Dropped(
        f"the template {name} does not write tool results", "f:1"
    )


def test_deepseek_rows_with_a_second_round_of_calls_are_dropped() -> None:
    round_of_calls = (Message("assistant", "", tool_calls=CALLS[:1]), Message("tool", "X"))
    end = (Message("assistant", "R"),)
    for middle in (round_of_calls * 2, (*round_of_calls, *end, Message("user", "Q2"), *round_of_calls)):
        outcome = encoder_of("deepseek3").encode(Conversation((Message("user", "Q"), *middle, *end)))
        assert isinstance(outcome, Dropped) and "one round of function calls" in outcome.reason


INLINE = "<think>\nwhy {n}\n</think>\n\nR{n}"


def thinking_talk(kind: str, turns: int) -> Conversation:
    messages: list[Message] = []
    for n in range(turns):
        reply = {
            "none": Message("assistant", f"R{n}"),
            "inline": Message("assistant", INLINE.format(n=n)),
            "field": Message("assistant", f"R{n}", f"why {n}"),
        }[kind]
        messages += [Message("user", f"Q{n}"), reply]
    return Conversation(tuple(messages))


@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("kind", ["none", "inline", "field"])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepseek_r1"])
def test_thoughts(name: str, turns: int, kind: str, enable_thinking: bool | None) -> None:
    conversation = thinking_talk(kind, turns)
    samples = encoded(name, conversation, enable_thinking)
    # what is to be rendered: without thoughts if thinking is off
    shown = thinking_talk("none", turns) if enable_thinking is False else conversation
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rewritten = name == "glm4" and kind != "none" and enable_thinking is not False
    stops = [2 * n for n in range(1, turns + 1)] if rewritten else [2 * turns]
    own = [own_ids(name, replace(shown, turns=shown.turns[:stop]), **options) for stop in stops]
    assert [sample.input_ids.tolist() for sample in samples] == own
    trained = trained_text(tokenizer_of(name), samples)
    if rewritten:
        assert trained == [[f"\n<think>why {n}</think>\nR{n}<|user|>"] for n in range(turns)]
    elif name == "glm4":
        header = "" if enable_thinking is False else "\n<think></think>"
        assert trained == [[f"{header}\nR{n}<|user|>" for n in range(turns)]]
    else:
        kept = kind == "inline" and enable_thinking is not False
        # DeepSeek's cuts all up to </think> and leaves the line ends after it
        cut = "\n" if name == "deepseek3" else INLINE
        texts = [cut.replace("{n}", str(n)) if kept else f"R{n}" for n in range(turns)]
        if name == "deepseek3" and kept:
            # the blank line behind the cut: one token with nothing else, so it is the reply's
            texts = [f"\n\nR{n}" for n in range(turns)]
        assert trained == [ended(name, texts)]


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("kind", ["inline", "field"])
def test_r1_trains_each_thought_behind_the_family_s_own_prompt_and_forgets_earlier_ones(
    kind: str, turns: int
) -> None:
    name = "deepseek_r1"
    conversation = thinking_talk(kind, turns)
    samples = encoded(name, conversation)
    assert len(samples) == turns
    end = "<｜end▁of▁sentence｜>"
    for n, sample in enumerate(samples):
        given = replace(conversation, turns=conversation.turns[: 2 * n + 1])
        prompt = own_ids(name, given, add_generation_prompt=True)
        reply = tokenizer_of(name)(f"why {n}\n</think>\n\nR{n}{end}", add_special_tokens=False)["input_ids"]
        assert sample.input_ids.tolist() == prompt + reply
    assert trained_text(tokenizer_of(name), samples) == [
        [f"why {n}\n</think>\n\nR{n}{end}"] for n in range(turns)
    ]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(("kind", "enable_thinking"), [("none", True), ("none", None), ("inline", False)])
def test_r1_without_thoughts_is_the_family_s_text(
    kind: str, enable_thinking: bool | None, turns: int
) -> None:
    samples = encoded("deepseek_r1", thinking_talk(kind, turns), enable_thinking)
    own = own_ids("deepseek_r1", thinking_talk("none", turns))
    assert [sample.input_ids.tolist() for sample in samples] == [own]


def test_glm_thoughts_inside_one_tool_exchange_share_a_sample() -> None:
    turns = (
        Message("user", "Q"),
        Message("assistant", "", "why", CALLS[:1]),
        Message("tool", "42"),
        Message("assistant", "done", "so"),
    )
    conversation = Conversation(turns, None, TOOLS)
    samples = encoded("glm4", conversation)
    assert [sample.input_ids.tolist() for sample in samples] == [own_ids("glm4", conversation)]
    assert trained_text(tokenizer_of("glm4"), samples) == [
        [
            f"\n<think>why</think>{WRITTEN['glm4'][0]}<|observation|>",
            "\n<think>so</think>\ndone<|user|>",
        ]
    ]


def test_glm_marks_a_question_once_when_thinking_is_off() -> None:
    conversation = Conversation((Message("user", "Q/nothink"), Message("assistant", "R")))
    samples = encoded("glm4", conversation, False)
    own = own_ids("glm4", conversation, enable_thinking=False)
    assert samples[0].input_ids.tolist() == own
    assert tokenizer_of("glm4").decode(own).count("/nothink") == 1


def test_the_end_of_turn_becomes_the_eos_where_the_reference_does_so() -> None:
    expected = {
        "qwen2.5": "<|im_end|>", "llama3": "<|eot_id|>", "llama3.1": "<|eot_id|>", "gemma": "<end_of_turn>",
        "gemma3": "<end_of_turn>", "phi3": "<|end|>", "glm4": "<|endoftext|>",
        "deepseek3": "<｜end▁of▁sentence｜>", "deepseek_r1": "<｜end▁of▁sentence｜>",
    }  # fmt: skip
    assert sorted(expected) == NAMES
    for name, eos in expected.items():
        tokenizer = family_tokenizer(name)
        before = Encoder(tokenizer, template=name).encode(plain_talk(2))
        assert tokenizer.eos_token == eos
        again = Encoder(tokenizer, template=name).encode(plain_talk(2))  # text is the same with the new eos
        assert before[0].input_ids.tolist() == again[0].input_ids.tolist()  # type: ignore[index]


WORDS = st.text(st.sampled_from("ab tin\n\r <|>{}/é中\u2028😀"), min_size=1, max_size=12).filter(str.strip)
TEXTS = st.one_of(WORDS, WORDS.map(lambda text: f"<think>{text}</think>{text}"), st.just("{content}{bos}"))


def check_any_text(name: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    if name == "deepseek_r1":  # whose thoughts have a test of their own
        pairs = [(question, reply.replace("</think>", "")) for question, reply in pairs]
    turns = [turn for q, r in pairs for turn in (Message("user", q), Message("assistant", r))]
    conversation = Conversation(tuple(turns), system)
    outcome = encoder_of(name).encode(conversation)
    if isinstance(outcome, Dropped):
        assert name == "gemma" and system, outcome
        return
    if name == "glm4" and any("</think>" in reply for _, reply in pairs):
        assert outcome[-1].input_ids.tolist() == own_ids(name, conversation)
        return
    assert [sample.input_ids.tolist() for sample in outcome] == [own_ids(name, conversation)]
    replies = [r.rpartition("</think>")[2] if name == "deepseek3" else r for _, r in pairs]
    (stretches,) = trained_text(tokenizer_of(name), outcome)
    # a line end that the prompt's last token holds too is left to the prompt
    assert [text.lstrip("\n") for text in stretches] == [text.lstrip("\n") for text in ended(name, replies)]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pairs=st.lists(st.tuples(WORDS, TEXTS), min_size=1, max_size=3),
    system=st.none() | WORDS,
)
def test_any_text(name: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    check_any_text(name, pairs, system)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pairs=st.lists(st.tuples(WORDS, TEXTS), min_size=1, max_size=4),
    system=st.none() | WORDS,
)
def test_any_text_at_length(name: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    check_any_text(name, pairs, system)
