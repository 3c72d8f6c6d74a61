"""``weight`` and ``train`` of a turn: which replies are trained, from the row to the labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer, trained_text

from shardyard.data.converters import convert
from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.sources import DatasetEntry, Row
from shardyard.data.sources.entry import OPENAI_COLUMNS, OPENAI_TAGS
from shardyard.data.types import Conversation, Message

SHAREGPT = DatasetEntry("s", (Path("s.json"),), "sharegpt")
OPENAI = DatasetEntry("o", (Path("o.json"),), "openai", OPENAI_COLUMNS, OPENAI_TAGS)

END = "<|im_end|>\n"

REWRITES = r"""
tokens: ["<|im_start|>", "<|im_end|>"]
system: "<|im_start|>system\n{content}<|im_end|>\n"
user: "<|im_start|>user\n{content}<|im_end|>\n"
assistant: {header: "<|im_start|>assistant\n", end: "<|im_end|>\n"}
thinking: {inline: apart, open: "<think>", close: "</think>", earlier: leave_out}
"""
"""A template that leaves out the thoughts of earlier replies."""


def converted(formatting: str, *flags: dict[str, Any]) -> Conversation | Dropped:
    """A row of questions and replies; ``flags`` are put into the replies."""
    turns: list[dict[str, Any]] = []
    for number, given_flags in enumerate(flags):
        if formatting == "openai":
            asked = {"role": "user", "content": f"q{number}"}
            replied = {"role": "assistant", "content": f"r{number}"}
        else:
            asked, replied = {"from": "human", "value": f"q{number}"}, {"from": "gpt", "value": f"r{number}"}
        turns += [asked, {**replied, **given_flags}]
    entry, column = (OPENAI, "messages") if formatting == "openai" else (SHAREGPT, "conversations")
    return convert(Row({column: turns}, "f:1"), entry)


def trained(flags: list[dict[str, Any]], **options: Any) -> Any:
    conversation = converted("openai", *flags)
    assert isinstance(conversation, Conversation)
    tokenizer = byte_tokenizer(tiny.CHATML)
    return trained_text(tokenizer, Encoder(tokenizer, **options).encode(conversation))


@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, True),
        ({"weight": 1}, True),
        ({"weight": 1.0}, True),
        ({"weight": None, "train": None}, True),
        ({"train": True}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": False}, False),
        ({"weight": 1, "train": False}, False),
        ({"weight": 0, "train": True}, False),
    ],
)
def test_a_reply_is_trained_unless_one_of_its_flags_says_no(
    formatting: str, flags: dict[str, Any], expected: bool
) -> None:
    outcome = converted(formatting, flags, {})
    assert isinstance(outcome, Conversation)
    assert [turn.train for turn in outcome.turns] == [True, expected, True, True]


@pytest.mark.parametrize("weight", [0.5, 2, -1, "1", "0", [1], {}, float("nan")])
def test_a_weight_between_is_dropped_with_its_reason(weight: Any) -> None:
    assert converted("openai", {"weight": weight}) == Dropped("weight must be 0 or 1", "f:1")


@pytest.mark.parametrize("train", [0, 1, "true", []])
def test_a_train_that_is_not_a_truth_value_is_dropped_with_its_reason(train: Any) -> None:
    assert converted("sharegpt", {"train": train}) == Dropped("train must be true or false", "f:1")


@pytest.mark.parametrize("flags", [{"weight": 0}, {"train": False}])
def test_a_row_none_of_whose_replies_is_trained_is_dropped(flags: dict[str, Any]) -> None:
    outcome = converted("openai", flags, flags)
    assert isinstance(outcome, Dropped) and outcome.reason.startswith("no reply is to be trained")


def test_flags_of_other_turns_mean_nothing() -> None:
    turns = [
        {"role": "system", "content": "s", "weight": 0},
        {"role": "user", "content": "q", "weight": 0, "train": False},
        {"role": "assistant", "content": "r"},
    ]
    outcome = convert(Row({"messages": turns}, "f:1"), OPENAI)
    assert isinstance(outcome, Conversation) and all(turn.train for turn in outcome.turns)


@pytest.mark.parametrize("template", [None, "qwen3", "qwen2.5"])
def test_a_reply_that_is_context_only_has_no_labels_and_stays_in_the_text(template: str | None) -> None:
    tokenizer = byte_tokenizer(tiny.CHATML)
    encoder = Encoder(tokenizer, template=template, enable_thinking=False)
    conversation = converted("openai", {}, {"weight": 0}, {})
    assert isinstance(conversation, Conversation)
    samples = encoder.encode(conversation)
    assert not isinstance(samples, Dropped)
    stretches = [piece.removesuffix("\n") for sample in trained_text(tokenizer, samples) for piece in sample]
    assert stretches == ["r0<|im_end|>", "r2<|im_end|>"]
    assert "r1<|im_end|>" in tokenizer.decode(samples[-1].input_ids)


def test_a_template_that_rewrites_earlier_turns_gives_no_sample_for_a_reply_that_is_context_only() -> None:
    conversation = converted("openai", {"train": False}, {})
    assert isinstance(conversation, Conversation)
    tokenizer = byte_tokenizer(tiny.QWEN3_LIKE)
    samples = Encoder(tokenizer).encode(conversation)
    assert trained_text(tokenizer, samples) == [[f"<think>\n\n</think>\n\nr1{END}"]]


def test_train_on_prompt_trains_the_prompts_and_still_not_a_reply_that_is_context_only() -> None:
    (stretches,) = trained([{"weight": 0}, {}], train_on_prompt=True)
    text = "".join(stretches)
    assert "q0" in text and "q1" in text and f"r1{END}" in text and "r0" not in text


def thinking(*flags: bool) -> Conversation:
    """Replies with thoughts, which a template of the qwen3 kind leaves out of all but the last."""
    turns: list[Message] = []
    for number, train in enumerate(flags):
        reply = Message("assistant", f"reply {number}", reasoning=f"why {number}", train=train)
        turns += [Message("user", f"ask {number}"), reply]
    return Conversation(tuple(turns), "Be brief.")


@pytest.mark.parametrize(
    ("source", "template"),
    [(tiny.QWEN3_LIKE, None), (tiny.CHATML, REWRITES), (tiny.CHATML, f"{REWRITES}pieces: apart\n")],
)
def test_prompts_of_samples_that_repeat_earlier_turns_are_trained_once_and_their_replies_never(
    source: str, template: str | None, tmp_path: Path
) -> None:
    if template:
        (tmp_path / "own.yaml").write_text(template, encoding="utf-8")
        template = str(tmp_path / "own.yaml")
    tokenizer = byte_tokenizer(source)
    encoder = Encoder(tokenizer, template=template, train_on_prompt=True)
    samples = encoder.encode(thinking(False, True, True))
    assert not isinstance(samples, Dropped) and len(samples) == 3
    text = "|".join(piece for sample in trained_text(tokenizer, samples) for piece in sample)
    assert [text.count(f"ask {n}") for n in range(3)] == [1, 1, 1]
    assert [text.count(f"reply {n}") for n in range(3)] == [0, 1, 1]
    assert [text.count(f"why {n}") for n in range(3)] == [0, 1, 1]
    assert text.count("Be brief.") == 1
    for number, sample in enumerate(samples):  # the context stays what the model meets
        assert "Be brief." in tokenizer.decode(sample.input_ids)
        assert all(f"ask {n}" in tokenizer.decode(sample.input_ids) for n in range(number + 1))


@pytest.mark.parametrize(
    ("flags", "last"),
    [([{}, {}, {}], 2), ([{}, {}, {"weight": 0}], 1), ([{}, {"train": False}, {"weight": 0}], 0)],
)
@pytest.mark.parametrize("template", [None, "qwen3"])
def test_mask_history_trains_the_last_trained_reply_and_leaves_out_what_follows(
    flags: list[dict[str, Any]], last: int, template: str | None
) -> None:
    conversation = converted("openai", *flags)
    assert isinstance(conversation, Conversation)
    tokenizer = byte_tokenizer(tiny.CHATML)
    options = {"mask_history": True, "enable_thinking": False, "template": template}
    samples = Encoder(tokenizer, **options).encode(conversation)  # type: ignore[arg-type]
    assert not isinstance(samples, Dropped)
    assert trained_text(tokenizer, samples) == [[f"r{last}{END}"]]
    text = tokenizer.decode(samples[0].input_ids)
    assert [f"r{number}" in text for number in range(3)] == [number <= last for number in range(3)]


def test_mask_history_never_trains_history_when_the_last_reply_is_cut_off() -> None:
    conversation = converted("openai", {}, {})
    assert isinstance(conversation, Conversation)
    tokenizer = byte_tokenizer(tiny.CHATML)
    whole = Encoder(tokenizer, mask_history=True).encode(conversation)
    assert not isinstance(whole, Dropped)
    reply = len(tokenizer(f"r1{END}")["input_ids"])
    for cutoff_len in range(1, len(whole[0].input_ids)):
        cut = Encoder(tokenizer, mask_history=True, cutoff_len=cutoff_len).encode(conversation)
        if cutoff_len <= len(whole[0].input_ids) - reply:
            assert cut == Dropped("no trained token left within data.cutoff_len", "f:1")
        else:
            ((stretch,),) = trained_text(tokenizer, cut)
            assert f"r1{END}".startswith(stretch)


@settings(max_examples=30, deadline=None)
@given(
    keep=st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
    template=st.sampled_from([None, "qwen3"]),
    split=st.booleans(),
)
def test_the_trained_replies_are_those_that_the_row_asks_for(
    keep: list[bool], template: str | None, split: bool
) -> None:
    conversation = converted("sharegpt", *({"train": value} for value in keep))
    assert isinstance(conversation, Conversation)
    tokenizer = byte_tokenizer(tiny.CHATML)
    encoder = Encoder(tokenizer, template=template, enable_thinking=False, split_special_tokens=split)
    wanted = [f"r{number}{END}" for number, value in enumerate(keep) if value]
    assert trained_text(tokenizer, encoder.encode(conversation)) == [wanted]
