"""Text token by token: what comes out is what decoding all tokens at once gives, cut at the stop text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import byte_tokenizer, metaspace_tokenizer, sentencepiece_tokenizer

from shardyard.infer.text import TextStream, begun

KINDS = {
    "bytes": byte_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "metaspace": metaspace_tokenizer,
}


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def streamed(kind: str, ids: list[int], stop: tuple[str, ...] = (), **options: Any) -> list[str]:
    stream = TextStream(tokenizer_of(kind), stop, **options)
    return [*(stream.feed(token_id) for token_id in ids), stream.flush()]


def decoded(kind: str, ids: list[int], *, skip_special: bool = True) -> str:
    tokenizer = tokenizer_of(kind)
    return tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def cut(text: str, stop: tuple[str, ...], *, included: bool = False) -> str:
    """Letter by letter: up to the first at which a stop text ends."""
    for end in range(len(text) + 1):
        ended = [word for word in stop if text[:end].endswith(word)]
        if ended:
            return text[:end] if included else text[: end - max(map(len, ended))]
    return text


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, those of text, and some that the tokenizer lacks."""
    tokenizer = tokenizer_of(kind)
    any_ids = st.lists(st.integers(0, len(tokenizer) + 3), max_size=40)
    texts = st.text(alphabet="ab né天😀 \n<|>", max_size=20).map(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    return st.lists(st.one_of(any_ids, texts), max_size=4).map(
        lambda parts: [i for part in parts for i in part]
    )


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_text_of_all_tokens(kind: str, skip_special: bool, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    pieces = streamed(kind, ids, skip_special=skip_special)
    assert "".join(pieces) == decoded(kind, ids, skip_special=skip_special)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_end_at_the_first_stop_text(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    text = decoded(kind, ids)
    parts = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda start: st.integers(1, 6).map(lambda length: text[start : start + length] or "x")
    )
    stop = tuple(data.draw(st.lists(st.one_of(parts, st.text("ab <|", min_size=1, max_size=4)), max_size=3)))
    for included in (False, True):
        stream = TextStream(tokenizer_of(kind), stop, include_stop=included)
        pieces = [*map(stream.feed, ids), stream.flush()]
        assert "".join(pieces) == cut(text, stop, included=included)
        assert stream.finished == any(word in text for word in stop)


def test_a_character_comes_whole() -> None:
    ids = tokenizer_of("bytes")("é😀", add_special_tokens=False)["input_ids"]
    assert streamed("bytes", ids) == ["", "é", "", "", "", "😀", ""]
    assert streamed("bytes", ids[:-1]) == ["", "é", "", "", "", "\ufffd"]


def test_fallback_bytes_are_read_together() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = tokenizer("a天b", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "<0xE5>", "<0xA4>", "<0xA9>", "b"]
    assert streamed("sentencepiece", ids) == ["a", "", "", "", "天b", ""]
    # one byte too many, and none of the run is a character: as the tokenizer's own decoder has it
    assert "".join(streamed("sentencepiece", [*ids[:4], ids[3]])) == "a" + 4 * "\ufffd"


def test_spaces_of_words_stay_and_the_first_goes() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = tokenizer("a b  a", add_special_tokens=False)["input_ids"]
    assert "".join(streamed("sentencepiece", ids)) == "a b  a"
    special = tokenizer.convert_tokens_to_ids("</s>")
    a = tokenizer.convert_tokens_to_ids("▁a")
    assert streamed("sentencepiece", [special, a, special, a]) == ["", "a", "", " a", ""]


def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    ids = tokenizer_of("bytes")("ab<|b<|end", add_special_tokens=False)["input_ids"]
    assert streamed("bytes", ids, ("<|end",)) == ["a", "b", "", "", "<|b", "", "", "", "", "", ""]
    assert streamed("bytes", ids[:7], ("<|end",)) == ["a", "b", "", "", "<|b", "", "", "<|"]


def test_nothing_comes_after_a_stop_text() -> None:
    ids = tokenizer_of("bytes")("a.b", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer_of("bytes"), (".",))
    assert [*map(stream.feed, ids), stream.flush(), stream.stopped_by] == ["a", "", "", "", "."]


def test_special_tokens_that_are_asked_for_stay() -> None:
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer("<|user|>a<|end|>", add_special_tokens=False)["input_ids"]
    assert "".join(streamed("bytes", ids)) == "a"
    assert "".join(streamed("bytes", ids, keep=("<|user|>x",))) == "<|user|>a"


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer_of("bytes"), ("",))


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_begun_is_the_longest_beginning(text: str, words: list[str]) -> None:
    fits = [n for n in range(len(text) + 1) for word in words if n < len(word) and text.endswith(word[:n])]
    assert begun(text, words) == max(fits, default=0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_work_for_a_token_does_not_grow(kind: str) -> None:
    """Counted: the ids that the tokenizer is asked to decode."""
    tokenizer = KINDS[kind]()
    asked: list[int] = []
    decode = tokenizer.decode

    def counted(ids: Any, **options: Any) -> str:
        asked.append(len(ids))
        return decode(ids, **options)

    tokenizer.decode = counted
    stream = TextStream(tokenizer, ("zz",))
    ids = tokenizer("a b 天 " * 60, add_special_tokens=False)["input_ids"] + [3] * 60
    for token_id in ids:
        stream.feed(token_id)
    assert sum(asked) < 20 * len(ids)
