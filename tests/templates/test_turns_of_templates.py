"""What a template hands on with each reply: whether it is trained, and whether its thought was lost."""

from __future__ import annotations

import logging

import pytest
from support import tokenizers as tiny
from support.families import family_tokenizer
from support.tokenizers import byte_tokenizer

from shardyard.data.encode import Encoder
from shardyard.data.templates import build_template
from shardyard.data.templates.base import Turn
from shardyard.data.types import Conversation, Message

FLAGGED = Conversation(
    (
        Message("user", "q1"),
        Message("assistant", "r1", train=False),
        Message("user", "q2"),
        Message("assistant", "r2"),
    ),
    where="f:1",
)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", [None, "qwen3", "qwen2.5", "chatml", "empty"])
def test_a_reply_that_is_context_only_is_told(name: str | None, split: bool) -> None:
    tokenizer = byte_tokenizer(tiny.CHATML)
    template = build_template(name, tokenizer, split_special_tokens=split)
    (turns,) = template.encode(FLAGGED)
    assert [turn.trained for turn in turns] == [False, True]


def thoughtful(*replies: Message) -> Conversation:
    turns = [turn for reply in replies for turn in (Message("user", "q"), reply)]
    return Conversation(tuple(turns), where="f:2")


def lost(name: str | None, conversation: Conversation, **options: bool | None) -> list[bool]:
    tokenizer = byte_tokenizer(tiny.OPENS_A_THOUGHT) if name in (None, "qwen3") else family_tokenizer(name)
    template = build_template(name, tokenizer, **options)  # type: ignore[arg-type]
    return [turn.lost_thought for sample in template.encode(conversation) for turn in sample]


def test_a_lost_thought_is_told() -> None:
    inline, apart = Message("assistant", "<think>why</think>r"), Message("assistant", "r", "why")
    plain = Message("assistant", "r")
    assert lost("deepseek3", thoughtful(plain, inline, apart)) == [False, True, True]
    assert lost("qwen2.5", thoughtful(plain, inline, apart)) == [False, False, True]
    assert lost("qwen3", thoughtful(plain, inline, apart)) == [False, False, False]
    assert lost("glm4", thoughtful(plain, inline, apart)) == [False, False, False]
    assert lost("deepseek_r1", thoughtful(plain, inline, apart)) == [False, False, False]
    assert lost(None, thoughtful(plain, inline, apart)) == [False, True, True]


def test_thoughts_that_are_to_be_removed_are_not_lost() -> None:
    inline = Message("assistant", "<think>why</think>r")
    for name in (None, "qwen3", "deepseek3", "glm4"):
        assert lost(name, thoughtful(inline, Message("assistant", "r", "why")), enable_thinking=False) == [
            False,
            False,
        ]


@pytest.mark.parametrize(
    ("name", "warned"), [("empty", True), ("glm4", False), ("qwen3", False), ("phi3", False)]
)
def test_a_template_without_an_end_of_turn_warns(
    name: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = family_tokenizer(name) if name in ("glm4", "phi3") else byte_tokenizer()
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        build_template(name, tokenizer)
    assert ("do not teach a model where to stop" in caplog.text) is warned


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "glm4", "phi3", "deepseek3", "gemma3"])
def test_special_tokens_that_a_row_spells_out_are_words_if_they_are_to_be_split(name: str) -> None:
    tokenizer = family_tokenizer(name)
    special = {
        token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    words = " and ".join(special)
    conversation = Conversation(
        (Message("user", f"say {words}."), Message("assistant", f"it is {words}.")), f"be {words}."
    )
    plain = Conversation((Message("user", "say"), Message("assistant", "it is")), "be")
    template = build_template(name, tokenizer, split_special_tokens=True)
    ((turn,),), ((other,),) = template.encode(conversation), template.encode(plain)
    text = "".join(tokenizer.decode(ids) for ids in (turn.prompt, turn.reply))
    assert text == build_template(name, family_tokenizer(name)).samples(conversation)[0][0].prompt + (  # type: ignore[attr-defined]
        build_template(name, family_tokenizer(name)).samples(conversation)[0][0].reply  # type: ignore[attr-defined]
    )
    for ours, without in ((turn.prompt, other.prompt), (turn.reply, other.reply)):
        assert [token for token in ours if token in special.values()] == [
            token for token in without if token in special.values()
        ]


def test_a_turn_is_trained_unless_told() -> None:
    assert Turn([1], [2]) == Turn([1], [2], True, False)


def test_an_end_that_belongs_to_the_next_turn_is_written_where_labels_stand_at_their_token() -> None:
    tokenizer = family_tokenizer("glm4")
    conversation = Conversation((Message("user", "Q"), Message("assistant", "R")))
    (sample,) = Encoder(tokenizer, template="glm4").encode(conversation)
    (written,) = Encoder(tokenizer, template="glm4", write_stops=True).encode(conversation)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert sample.labels[-1] == user
    assert written.input_ids.tolist() == [*sample.input_ids.tolist(), user]
    assert written.labels.tolist() == [*sample.labels.tolist(), -100]
    full = len(sample.input_ids)
    for room in (full, full - 1):
        for write_stops in (False, True):
            encoder = Encoder(tokenizer, template="glm4", cutoff_len=room, write_stops=write_stops)
            (cut,) = encoder.encode(conversation)
            trains_the_end = room == full and not write_stops
            assert (len(cut.input_ids), int(cut.labels[-1])) == (room, user if trains_the_end else -100)
