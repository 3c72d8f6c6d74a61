"""Encoding by remembered pieces gives the library's own ids, or leaves the text to it."""

from __future__ import annotations

import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardyard.data.preprocess import pieces
from shardyard.data.preprocess.pieces import PieceEncoder
from shardyard.data.preprocess.texts import TextEncoder
from shardyard.errors import UserError

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""An expression as such tokenizers use: contractions, words, numbers, marks, line ends, spaces."""


def library(expression=WORDS, *, normalizer=None, behavior="isolated", use_regex=False):
    """A byte-level BPE of the library with merges that reach over letters, spaces, digits and line ends."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("i", "n"), ("Ċ", "Ċ"), ("1", "2"), ("'", "s"), ("Ġ", "Ġ"), ("ä", "¸")]
    words = [*letters, *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


PLAIN, NFC = library(), library(normalizer=normalizers.NFC())
ENCODERS = {"plain": (PLAIN, PieceEncoder.of(PLAIN)), "nfc": (NFC, PieceEncoder.of(NFC))}

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["'s", "'S", "'ll", "'\u017f", " the", "  ", "\n", "\r\n", "123", "1234", "...", "in"]
        ),
        st.sampled_from(
            ["e\u0301", "\u00e9", "中文", "\u3000", "\u00a0", "\u0085", "\x1c", "ǅ", "²", "🙂\ufe0f"]
        ),
        st.sampled_from(["<think>", "<|end|>", "<|en", "\u200d", "\u0e01", "\ud7a3", "\U00013000"]),
        st.text(max_size=6),
    ),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids_are_the_librarys(kind, text):
    made, encoder = ENCODERS[kind]
    assert encoder is not None
    if encoder.takes(text):
        assert encoder.encode(text) == made.encode(text).ids


@pytest.mark.soak
@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=20_000, deadline=None)
@given(text=TEXTS)
def test_ids_are_the_librarys_for_many_texts(kind, text):
    made, encoder = ENCODERS[kind]
    assert encoder is not None
    if encoder.takes(text):
        assert encoder.encode(text) == made.encode(text).ids


def test_it_takes_usual_text_and_leaves_the_rest():
    made, encoder = ENCODERS["nfc"]
    taken = ["plain words, 123!\n", "Größe — “quoted” …", "中文，日本語のテキスト 한국어", "Привет Ελλάδα 🙂"]
    left = ["a <think> b", "<|end|>", "e\u0301", "\U00013000"]
    assert all(map(encoder.takes, taken)) and not any(map(encoder.takes, left))
    assert [encoder.encode(text) for text in taken] == [made.encode(text).ids for text in taken]


@pytest.mark.parametrize(
    "other",
    [
        Tokenizer(models.BPE()),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        library(normalizer=normalizers.Lowercase()),
        library(behavior="removed"),
        library(use_regex=True),
        library(expression=r"(\p{L}+)|."),
    ],
    ids=["no pieces", "no BPE", "lower case", "text removed", "two expressions", "groups"],
)
def test_other_kinds_of_tokenizers_have_none(other):
    assert PieceEncoder.of(other) is None


def test_a_tokenizer_that_adds_tokens_of_itself_has_none():
    made = library()
    end = ("<|end|>", made.token_to_id("<|end|>"))
    made.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[end])
    assert PieceEncoder.of(made) is None


def test_text_that_the_expression_leaves_out_is_left_to_the_library():
    encoder = PieceEncoder.of(library(expression=r"(?!zzz)[\s\S]"))
    assert encoder is not None
    assert encoder.encode("pizzeria") is not None
    assert encoder.encode("pizzzeria") is None


def test_an_expression_that_means_something_else_to_the_other_engine_is_not_used():
    assert PieceEncoder.of(library(expression=r"\h+|[^\h]+")) is None  # hex digits there, spaces here


def test_a_full_memory_changes_nothing(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_PIECES", 5)
    made = library()
    encoder = PieceEncoder.of(made)
    rng = random.Random(0)
    for _ in range(50):
        text = " ".join("".join(rng.choices("abcdefghint12", k=4)) for _ in range(9))
        assert encoder.encode(text) == made.encode(text).ids
    assert len(encoder._ids) == 5


def test_one_text_of_each_batch_is_held_against_the_library(monkeypatch):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library())
    encode = TextEncoder(tokenizer, split_special_tokens=False)
    texts = ["some words", "other words"]
    assert encode(texts) == [tokenizer(text)["input_ids"] for text in texts]
    monkeypatch.setitem(encode._pieces._ids, "some", (0, 0))
    with pytest.raises(UserError, match=r"fast path .* for 'some words'.*--tokenizer-not-use-fast"):
        encode(texts)


def test_characters_that_one_engine_alone_counts_as_letters_are_left_to_the_library():
    """Tables of Unicode differ by years: what ``regex`` calls a letter may be unassigned to the library."""
    made = library()
    encoder = PieceEncoder.of(made)
    words = pre_tokenizers.Split(Regex(r"\p{L}"), "removed")
    for character in map(chr, [*range(0x80, 0x3400), *range(0xA000, 0xD7FF)]):
        is_letter = words.pre_tokenize_str(character) == []
        if is_letter != bool(regex.fullmatch(r"\p{L}", character)):
            assert not encoder.takes(character)
        for text in (f"{character}'s", f"{character}'S1", f"a{character}'ll"):
            if encoder.takes(text):
                assert encoder.encode(text) in (None, made.encode(text).ids), ascii(text)
