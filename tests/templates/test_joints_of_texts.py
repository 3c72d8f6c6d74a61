"""Ids from stretches between special tokens: those of the whole text, each stretch tokenised once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import CHATML, byte_tokenizer

from shardyard.data.templates import build_template
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.data.types import Conversation, Message


def metaspace_tokenizer(scheme: str) -> Any:
    """A unigram model with ``▁`` for spaces, put in front of a text by ``scheme``."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    words = [("<unk>", 0.0), *((letter, -9.0) for letter in letters), ("▁", -3.0), ("▁a", -3.0), ("ab", -4.0)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def odd_tokenizer() -> Any:
    """Special tokens that take white space, that overlap and that hold one another."""
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken("<l>", lstrip=True, normalized=False),
                AddedToken("<r>", rstrip=True, normalized=False),
                AddedToken("<w>", single_word=True, normalized=False),
                AddedToken("x<a>", normalized=False),
                AddedToken("<a>", normalized=False),
                AddedToken("<b>y", normalized=False),
                AddedToken("y<c>", normalized=False),
            ]
        }
    )
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "first": metaspace_tokenizer("first"),
    "always": metaspace_tokenizer("always"),
    "never": metaspace_tokenizer("never"),
    "odd": odd_tokenizer(),
}
WORDS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "<l>", "<r>", "<w>", "x<a>", "<a>", "<b>y",
    "y<c>", "a", "b", " ", "\n", "in", "t", "x", "y", "é", "中", "<", ">", "|",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)


def check(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = TextTokenizer(tokenizer, split_special_tokens=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens.ids(text, {}) == expected
    assert tokens.ids(text, {}) == expected  # from what is remembered


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(TOKENIZERS)), text=TEXTS)
def test_the_ids_are_those_of_the_whole_text(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.soak
@settings(max_examples=20000, deadline=None)
@given(name=st.sampled_from(sorted(TOKENIZERS)), text=TEXTS)
def test_the_ids_are_those_of_the_whole_text_at_length(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.parametrize("name", [None, "qwen2.5"])
def test_each_stretch_of_a_conversation_is_tokenised_once(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(CHATML)
    template = build_template(name, tokenizer)
    turns = [
        Message(role, f"{role} says {number} " * 50)  # type: ignore[arg-type]
        for number in range(6)
        for role in ("user", "assistant")
    ]
    template.encode(Conversation(tuple(turns[:2])))  # the tokens are tried once
    lengths: list[int] = []
    inner = type(tokenizer).__call__

    def counted(self: Any, text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return inner(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    (sample,) = template.encode(Conversation(tuple(turns)))
    length = len(tokenizer.decode([token for turn in sample for token in turn.prompt + turn.reply]))
    assert sum(lengths) < 1.1 * length


def test_it_can_be_sent_to_other_processes() -> None:
    tokens = TextTokenizer(byte_tokenizer(), split_special_tokens=False)
    text = "<|im_start|>a\n<|im_end|>"
    assert pickle.loads(pickle.dumps(tokens)).ids(text, {}) == tokens.ids(text, {})
