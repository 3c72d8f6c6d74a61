"""What a template hands on with each reply: whether it is trained, and whether its thought was lost."""

from __future__ import annotations

import pytest
from support import tokenizers as tiny
from support.families import family_tokenizer
from support.tokenizers import byte_tokenizer

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


def test_a_turn_is_trained_unless_told() -> None:
    assert Turn([1], [2]) == Turn([1], [2], True, False)
