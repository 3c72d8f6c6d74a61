"""Cutting to the cut-off and making labels, worked out by hand and by plain loops."""

from __future__ import annotations

import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import CHATML, byte_tokenizer, trained_text

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder, cut_each_turn, cut_end, share_room, shifted
from shardyard.data.templates import Turn
from shardyard.data.types import Conversation, Message


def test_prompt_1_2_3_and_reply_9_2_are_trained_on_exactly_9_and_2() -> None:
    sample = shifted([1, 2, 3, 9, 2], [False, False, False, True, True])
    assert sample.input_ids.tolist() == [1, 2, 3, 9, 2]
    assert sample.labels.tolist() == [-100, -100, 9, 2, -100]
    assert sample.doc_lens == (5,)
    assert sample.input_ids.dtype == sample.labels.dtype == "int32"


@pytest.mark.parametrize(
    ("prompt", "reply", "room", "kept"),
    [
        (100, 3, 64, (61, 3)),  # a short reply is kept whole
        (3, 100, 64, (3, 61)),  # a short prompt is kept whole
        (100, 100, 64, (32, 32)),  # else in proportion
        (100, 50, 64, (43, 21)),  # int(64 * 50 / 150) = 21
        (10, 10, 64, (10, 10)),  # nothing to cut
        (0, 100, 64, (0, 64)),
        (100, 32, 64, (49, 15)),  # 2 * 32 is not below 64: int(64 * 32 / 132) = 15
    ],
)
def test_sharing_the_room(prompt: int, reply: int, room: int, kept: tuple[int, int]) -> None:
    assert share_room(prompt, reply, room) == kept


def numbered(lengths: list[tuple[int, int]]) -> list[Turn]:
    """Turns whose tokens are their positions in the sample."""
    position = 0
    turns = []
    for prompt, reply in lengths:
        turns.append(
            Turn(
                list(range(position, position + prompt)),
                list(range(position + prompt, position + prompt + reply)),
            )
        )
        position += prompt + reply
    return turns


def test_each_turn_is_cut_in_the_room_that_is_left_and_later_ones_are_left_out() -> None:
    turns = numbered([(5, 3), (20, 20), (4, 4)])
    # 8 of 20 are used; 12 left for (20, 20): 6 and 6; nothing left for the third
    assert cut_each_turn(turns, 20) == [turns[0], Turn(turns[1].prompt[:6], turns[1].reply[:6])]
    # from the last: 8 used, 12 left for (20, 20), nothing for the first
    assert cut_each_turn(turns, 20, last_first=True) == [
        Turn(turns[1].prompt[:6], turns[1].reply[:6]),
        turns[2],
    ]


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 80))
def test_cutting_the_end_keeps_the_first_tokens(lengths: list[tuple[int, int]], room: int) -> None:
    tokens = [token for turn in cut_end(numbered(lengths), room) for token in turn.prompt + turn.reply]
    assert tokens == list(range(min(room, sum(p + r for p, r in lengths))))


@given(LENGTHS, st.integers(1, 80), st.booleans())
def test_cutting_each_turn_keeps_within_the_room_and_keeps_starts(
    lengths: list[tuple[int, int]], room: int, last_first: bool
) -> None:
    turns = numbered(lengths)
    kept = cut_each_turn(turns, room, last_first=last_first)
    total = sum(len(turn.prompt) + len(turn.reply) for turn in kept)
    assert total <= room
    if sum(p + r for p, r in lengths) <= room:
        assert kept == turns
    originals = turns[len(turns) - len(kept) :] if last_first else turns
    for cut, whole in zip(kept, originals, strict=False):
        assert cut.prompt == whole.prompt[: len(cut.prompt)]
        assert cut.reply == whole.reply[: len(cut.reply)]


def talk(*texts: str) -> Conversation:
    turns = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))
    return Conversation(turns, where="f:1")


def test_mask_history_with_the_named_template_trains_the_last_reply_and_cuts_the_oldest_turns() -> None:
    tokenizer = byte_tokenizer()
    options = {"template": "qwen3", "mask_history": True, "enable_thinking": False}
    conversation = talk("q" * 30, "r" * 30, "p" * 30, "s" * 30)
    whole = Encoder(tokenizer, **options).encode(conversation)  # type: ignore[arg-type]
    assert trained_text(tokenizer, whole) == [["s" * 30 + "<|im_end|>\n"]]
    last_turn = len(whole[0].input_ids) // 2
    cut = Encoder(tokenizer, cutoff_len=last_turn, **options).encode(conversation)  # type: ignore[arg-type]
    assert trained_text(tokenizer, cut) == [["s" * 30 + "<|im_end|>\n"]]
    assert "q" not in tokenizer.decode(cut[0].input_ids) and len(cut[0].input_ids) == last_turn  # type: ignore[index]


def test_no_sample_is_longer_than_the_cutoff_and_no_end_token_is_made_up() -> None:
    for template in (None, "qwen3"):
        for cutoff_len in range(1, 90, 3):
            tokenizer = byte_tokenizer(CHATML)
            outcome = Encoder(tokenizer, template=template, cutoff_len=cutoff_len).encode(
                talk("q" * 9, "r" * 60)
            )
            if isinstance(outcome, Dropped):
                assert outcome.reason == "no trained token left within data.cutoff_len"
                continue
            (sample,) = outcome
            assert len(sample.input_ids) <= cutoff_len and (sample.labels != -100).any()
            whole = "<think>\n\n</think>\n\n" * (template == "qwen3") + "r" * 60 + "<|im_end|>\n"
            assert whole.startswith(trained_text(tokenizer, outcome)[0][0])


def test_an_encoder_and_its_samples_travel_between_processes() -> None:
    encoders = [
        Encoder(byte_tokenizer(CHATML), template=template, cutoff_len=40, split_special_tokens=True)
        for template in (None, "qwen3")
    ]
    conversation = talk("q", "r<|im_end|>" * 9)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for encoder in encoders:
            here, there = encoder.encode(conversation), pool.apply(encoder.encode, (conversation,))
            assert not isinstance(here, Dropped) and there.truncated and here.truncated
            assert here[0].input_ids.tolist() == there[0].input_ids.tolist()
