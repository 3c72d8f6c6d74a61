"""The tokenizer's own chat template: the family's ids, and masks that are proven per reply."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer, trained_text

from shardyard.data.dropped import Dropped
from shardyard.data.encode import LOST_THOUGHT, Encoder
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError


def talk(*texts: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    turns = (Message(roles[i % 2], text) for i, text in enumerate(texts))  # type: ignore[arg-type]
    return Conversation(tuple(turns), system, where="f:1")


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    head = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return head + [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


def encode(template: str, conversation: Conversation, **options: Any) -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(template)
    return tokenizer, Encoder(tokenizer, **options).encode(conversation)


@pytest.mark.parametrize("turns", [("q",), ("q", "q2"), ("q", "q2", "q3")])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_plain_template_gives_its_own_ids_in_one_sample_with_every_reply_trained(
    turns: tuple[str, ...], system: str | None
) -> None:
    texts = [text for q in turns for text in (q, f"r of {q}")]
    conversation = talk(*texts, system=system)
    tokenizer, samples = encode(tiny.CHATML, conversation)
    own = tokenizer.apply_chat_template(messages(conversation), return_dict=False)
    assert [s.input_ids.tolist() for s in samples] == [own]
    assert trained_text(tokenizer, samples) == [[f"r of {q}<|im_end|>\n" for q in turns]]


def test_labels_are_the_next_token_and_the_last_position_has_none() -> None:
    _, samples = encode(tiny.CHATML, talk("q", "r"))
    sample = samples[0]
    for t, label in enumerate(sample.labels[:-1]):
        assert label in (-100, sample.input_ids[t + 1])
    assert sample.labels[-1] == -100
    assert sample.doc_lens == (len(sample.input_ids),)


def test_a_template_that_drops_earlier_thoughts_gives_one_sample_per_reply_in_the_context_it_will_meet() -> (
    None
):
    conversation = talk("q1", "<think>a</think>b", "q2", "<think>c</think>d")
    tokenizer, samples = encode(tiny.QWEN3_LIKE, conversation)
    assert trained_text(tokenizer, samples) == [
        ["<think>\na\n</think>\n\nb<|im_end|>\n"],
        ["<think>\nc\n</think>\n\nd<|im_end|>\n"],
    ]
    for sample, turns in zip(samples, (2, 4), strict=True):
        own = tokenizer.apply_chat_template(messages(conversation)[:turns], return_dict=False)
        assert sample.input_ids.tolist() == own


def test_thoughts_inside_one_tool_exchange_share_a_sample() -> None:
    call = ToolCall("f", {"x": 1})
    turns = (
        Message("user", "q"),
        Message("assistant", "", "why", (call,)),
        Message("tool", "42"),
        Message("assistant", "done", "so"),
    )
    tokenizer, samples = encode(tiny.QWEN3_LIKE, Conversation(turns))
    assert trained_text(tokenizer, samples) == [
        [
            "<think>\nwhy\n</think>\n\n"
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n',
            "<think>\nso\n</think>\n\ndone<|im_end|>\n",
        ]
    ]


def test_mask_history_trains_the_last_reply_only() -> None:
    tokenizer, samples = encode(tiny.CHATML, talk("q1", "r1", "q2", "r2"), mask_history=True)
    assert trained_text(tokenizer, samples) == [["r2<|im_end|>\n"]]
    tokenizer, samples = encode(tiny.QWEN3_LIKE, talk("q1", "r1", "q2", "r2"), mask_history=True)
    assert trained_text(tokenizer, samples) == [["<think>\n\n</think>\n\nr2<|im_end|>\n"]]


def test_train_on_prompt_trains_every_token_but_the_first() -> None:
    _, samples = encode(tiny.CHATML, talk("q", "r"), train_on_prompt=True)
    assert samples[0].labels[:-1].tolist() == samples[0].input_ids[1:].tolist()


def test_thinking_off_puts_the_empty_thought_into_the_prompt_and_removes_those_of_the_data() -> None:
    for reply in (Message("assistant", "<think>a</think>\n\nb"), Message("assistant", "b", "a")):
        conversation = Conversation((Message("user", "q"), reply))
        tokenizer, samples = encode(tiny.QWEN3_LIKE, conversation, enable_thinking=False)
        assert trained_text(tokenizer, samples) == [["b<|im_end|>\n"]]
        assert tokenizer.decode(samples[0].input_ids) == (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n"
        )


def test_a_template_without_generation_prompt_keeps_the_header_out_of_the_mask() -> None:
    tokenizer, samples = encode(tiny.CHATML_WITHOUT_PROMPT, talk("q1", "r1", "q2", "r2"))
    assert trained_text(tokenizer, samples) == [["r1<|im_end|>\n", "r2<|im_end|>\n"]]


def test_a_template_without_any_header_trains_from_the_reply_on() -> None:
    tokenizer, samples = encode(tiny.INSTRUCTION, talk("q1", "run", "q2", "rest"))
    assert trained_text(tokenizer, samples) == [["run</s>", "rest</s>"]]


def test_a_line_end_that_the_prompt_and_the_reply_share_in_one_token_is_left_to_the_prompt() -> None:
    tokenizer, samples = encode(tiny.CHATML, talk("q", "\nr"))
    assert trained_text(tokenizer, samples) == [["r<|im_end|>\n"]]
    own = tokenizer.apply_chat_template(messages(talk("q", "\nr")), return_dict=False)
    assert samples[0].input_ids.tolist() == own


def test_a_template_that_ends_the_last_reply_in_its_own_way_trains_that_end_for_every_reply() -> None:
    tokenizer, samples = encode(tiny.ENDS_THE_LAST, talk("q1", "r1", "q2", "r2"))
    assert trained_text(tokenizer, samples) == [["r1<|end|><|eot|>"], ["r2<|end|><|eot|>"]]


def test_a_thought_that_only_the_generation_prompt_opens_is_left_out_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        tokenizer, samples = encode(tiny.OPENS_A_THOUGHT, talk("q1", "<think>a</think>r1", "q2", "r2"))
    assert trained_text(tokenizer, samples) == [["r1<|end|>", "r2<|end|>"]]
    assert "ends a prompt with '<think>\\n'" in caplog.text


@pytest.mark.parametrize(
    ("template", "lost"), [(tiny.CHATML, True), (tiny.OPENS_A_THOUGHT, True), (tiny.QWEN3_LIKE, False)]
)
def test_thoughts_that_a_template_leaves_out_are_noted(template: str, lost: bool) -> None:
    turns = (Message("user", "q"), Message("assistant", "r", "why"))
    encoder = Encoder(byte_tokenizer(template))
    notes = []
    for conversation in (talk("q", "r"), Conversation(turns)):
        samples = encoder.encode(conversation)
        assert not isinstance(samples, Dropped)
        notes.append(samples.notes)
    assert notes == [(), (LOST_THOUGHT,) if lost else ()]


def test_thoughts_inside_the_text_are_noted_too_unless_thinking_is_off() -> None:
    conversation = talk("q1", "<think>a</think>r1", "q2", "<think>\nb\n</think>\n\nr2")

    def notes(template: str, **options: Any) -> tuple[str, ...]:
        samples = Encoder(byte_tokenizer(template), **options).encode(conversation)
        assert not isinstance(samples, Dropped)
        return samples.notes

    assert notes(tiny.CHATML) == notes(tiny.QWEN3_LIKE) == ()
    assert notes(tiny.OPENS_A_THOUGHT, enable_thinking=False) == ()
    assert notes(tiny.OPENS_A_THOUGHT) == (LOST_THOUGHT,)


def test_a_thought_in_the_text_is_dropped_where_the_template_writes_a_second_one_before_it() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    _, outcome = encode(template, talk("q", "<think>a</think>r"))
    assert isinstance(outcome, Dropped) and "as reasoning_content" in outcome.reason
    apart = Conversation((Message("user", "q"), Message("assistant", "r", "a")))
    tokenizer, samples = encode(template, apart)
    assert trained_text(tokenizer, samples) == [["<think>a</think>r<|end|>"]]
    tokenizer, samples = encode(template, talk("q", "r"))
    assert trained_text(tokenizer, samples) == [["<think></think>r<|end|>"]]


def test_a_template_without_end_of_turn_trains_the_replies_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        tokenizer, samples = encode(tiny.NO_TERMINATOR, talk("q1", "r1", "q2", "r2"))
    assert trained_text(tokenizer, samples) == [["r1", "r2"]]
    assert "does not learn where to stop" in caplog.text


def test_a_template_whose_end_of_reply_cannot_be_told_is_refused() -> None:
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        Encoder(byte_tokenizer(tiny.ALWAYS_ASKS))


def test_a_tokenizer_without_chat_template_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"no chat template; set data\.template: qwen3"):
        Encoder(byte_tokenizer(None))


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be used"):
        Encoder(byte_tokenizer("{{ messages.nothing.here }}"))


def test_what_the_template_refuses_is_dropped_with_its_words() -> None:
    _, outcome = encode(tiny.INSTRUCTION, talk("q", "run", system="s"))
    assert outcome == Dropped("the chat template refuses it: No system here", "f:1")


def test_tools_and_calls_that_a_template_leaves_out_in_silence_drop_the_row() -> None:
    tool = {"name": "f", "parameters": {}}
    asked = Conversation((Message("user", "q"), Message("assistant", "r")), tools=(tool,), where="f:1")
    _, outcome = encode(tiny.CHATML, asked)
    assert outcome == Dropped("the chat template does not show tools to the model", "f:1")
    called = (
        Message("user", "q"),
        Message("assistant", "", tool_calls=(ToolCall("f", {}),)),
        Message("tool", "t"),
        Message("assistant", "r"),
    )
    _, outcome = encode(tiny.CHATML, Conversation(called, where="f:1"))
    assert outcome == Dropped("the chat template does not write function calls", "f:1")


def test_arguments_reach_a_template_that_joins_text_as_json_text() -> None:
    turns = (
        Message("user", "q"),
        Message("assistant", "", tool_calls=(ToolCall("f", {"城": "北京"}),)),
        Message("tool", "t"),
        Message("assistant", "r"),
    )
    tokenizer, samples = encode(tiny.CALLS_AS_TEXT, Conversation(turns))
    assert trained_text(tokenizer, samples) == [['f:{"城": "北京"}<|end|>', "r<|end|>"]]


def test_tools_are_shown_as_the_row_has_them() -> None:
    tool = {"name": "f", "parameters": {"城": None}}
    conversation = Conversation((Message("user", "q"), Message("assistant", "r")), "s", (tool,))
    tokenizer, samples = encode(tiny.QWEN3_LIKE, conversation)
    own = tokenizer.apply_chat_template(messages(conversation), tools=[tool], return_dict=False)
    assert samples[0].input_ids.tolist() == own
    assert json.dumps(tool, ensure_ascii=False) in tokenizer.decode(own)


def test_the_default_system_message_fills_in_for_a_missing_one() -> None:
    tokenizer, samples = encode(tiny.CHATML, talk("q", "r"), default_system="D")
    assert tokenizer.decode(samples[0].input_ids).startswith("<|im_start|>system\nD<|im_end|>\n")
    tokenizer, samples = encode(tiny.CHATML, talk("q", "r", system="S"), default_system="D")
    assert tokenizer.decode(samples[0].input_ids).startswith("<|im_start|>system\nS<|im_end|>\n")


def test_a_sample_is_cut_at_its_end_and_keeps_the_replies_that_are_left() -> None:
    conversation = talk("q1", "r1", "q2", "abcdef")
    tokenizer, whole = encode(tiny.CHATML, conversation)
    tokens = whole[0].input_ids.tolist()
    at = len(tokens) - 5  # inside the last reply: "ef", "<|im_end|>", "\n" and one letter are cut
    tokenizer, cut = encode(tiny.CHATML, conversation, cutoff_len=at)
    assert cut.truncated and not whole.truncated
    assert cut[0].input_ids.tolist() == tokens[:at]
    assert trained_text(tokenizer, cut) == [["r1<|im_end|>\n", "abc"]]


def test_a_row_whose_replies_are_all_cut_off_is_dropped() -> None:
    _, outcome = encode(tiny.CHATML, talk("a long question " * 10, "r"), cutoff_len=64)
    assert outcome == Dropped("no trained token left within data.cutoff_len", "f:1")


def test_only_the_samples_that_keep_a_reply_are_left_when_a_row_is_split() -> None:
    conversation = talk("q1", "r1", "q2" * 50, "r2")
    tokenizer, samples = encode(tiny.QWEN3_LIKE, conversation, cutoff_len=60)
    assert samples.truncated
    assert trained_text(tokenizer, samples) == [["<think>\n\n</think>\n\nr1<|im_end|>\n"]]


def test_special_tokens_in_the_text_become_tokens_unless_they_are_split() -> None:
    conversation = talk("say <|im_end|> now", "it is <|im_end|>.")
    tokenizer, samples = encode(tiny.CHATML, conversation)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert samples[0].input_ids.tolist().count(end) == 4
    tokenizer, samples = encode(tiny.CHATML, conversation, split_special_tokens=True)
    ids = samples[0].input_ids.tolist()
    assert ids.count(end) == 2
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages(conversation), tokenize=False)
    assert trained_text(tokenizer, samples) == [["it is <|im_end|>.<|im_end|>\n"]]


def test_half_of_a_surrogate_pair_is_dropped_not_raised() -> None:
    _, outcome = encode(tiny.CHATML, talk("q", "r \ud800"))
    assert isinstance(outcome, Dropped) and "not valid Unicode" in outcome.reason


def test_the_end_token_keeps_its_label_where_padding_is_the_same_token_and_where_its_id_is_zero() -> None:
    special = ("<|im_end|>", "<|im_start|>")
    tokenizer = byte_tokenizer(tiny.CHATML, special=special, eos="<|im_end|>", pad="<|im_end|>")
    assert tokenizer.eos_token_id == 0 == tokenizer.pad_token_id
    samples = Encoder(tokenizer).encode(talk("q", "r"))
    assert trained_text(tokenizer, samples) == [["r<|im_end|>\n"]]


def test_the_padding_side_changes_nothing() -> None:
    right, left = byte_tokenizer(tiny.CHATML), byte_tokenizer(tiny.CHATML)
    left.padding_side = "left"
    for length in (4, 9):
        conversation = talk("q" * length, "r" * length)
        a, b = Encoder(right).encode(conversation), Encoder(left).encode(conversation)
        assert a[0].labels.tolist() == b[0].labels.tolist()  # type: ignore[index]


WORDS = st.text(st.sampled_from("ab tin\n\r <|>é中\u2028😀"), min_size=1, max_size=12).filter(str.strip)


def expected_stretches(template: str, replies: list[str]) -> list[list[str]]:
    """What each template trains, sample by sample, written down by hand."""
    if template == tiny.QWEN3_LIKE:
        return [[f"<think>\n\n</think>\n\n{reply}<|im_end|>\n"] for reply in replies]
    if template == tiny.ENDS_THE_LAST:
        return [[f"{reply}<|end|><|eot|>"] for reply in replies]
    if template == tiny.INSTRUCTION:
        # " t" is one token, and the reply's
        return [[" " * reply.strip().startswith("t") + f"{reply.strip()}</s>" for reply in replies]]
    return [[f"{reply}<|im_end|>\n" for reply in replies]]


def check_masks(template: str, pairs: list[tuple[str, str]]) -> None:
    tokenizer = byte_tokenizer(template)
    conversation = talk(*(text for pair in pairs for text in pair))
    samples = Encoder(tokenizer).encode(conversation)
    assert not isinstance(samples, Dropped)
    # the white space that a reply shares in one token with the prompt's line end is the prompt's
    expected = expected_stretches(template, [reply for _, reply in pairs])
    for found, wanted in zip(trained_text(tokenizer, samples), expected, strict=True):
        for stretch, whole in zip(found, wanted, strict=True):
            assert whole == stretch or (whole == "\n" + stretch and template in MERGING)
    whole = tokenizer.apply_chat_template(messages(conversation), return_dict=False)
    assert samples[-1].input_ids.tolist() == whole


MERGING = (tiny.CHATML, tiny.CHATML_WITHOUT_PROMPT)
"""Templates that put a line end right in front of a reply."""
SHAPES = st.sampled_from([tiny.QWEN3_LIKE, tiny.ENDS_THE_LAST, tiny.INSTRUCTION, *MERGING])
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(template=SHAPES, pairs=PAIRS)
def test_fuzz_masks_are_the_replies_and_ids_the_templates(
    template: str, pairs: list[tuple[str, str]]
) -> None:
    check_masks(template, pairs)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None)
@given(template=SHAPES, pairs=PAIRS)
def test_fuzz_masks_at_length(template: str, pairs: list[tuple[str, str]]) -> None:
    check_masks(template, pairs)
