"""Bytes of labelled tokens, by hand: characters cut by tokens, special tokens, spaces."""

from __future__ import annotations

import numpy as np
import pytest
from support.run_data import make_tokenizer
from support.tokenizers import metaspace_tokenizer, sentencepiece_tokenizer
from support.training import samples_of

from shardyard.evaluate.text_bytes import bytes_of_tokens, labelled_bytes


def test_a_character_cut_by_tokens_counts_its_bytes_once():
    """é is 2 bytes, 语 3, and each token of this tokenizer is one byte of them."""
    tokenizer = make_tokenizer(extra=("<added>",))
    table = bytes_of_tokens(tokenizer)
    ids = tokenizer.encode("aé语", add_special_tokens=False)
    assert len(ids) == 6 and table[ids].tolist() == [1] * 6
    eos, added = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<added>")
    assert table[eos] == 0, "it is no text"
    assert table[added] == len("<added>")
    # Only the last two bytes of 语 and the end are labelled; an id beyond the tokenizer is no text.
    rows = [(ids, [-100, -100, -100, ids[4], ids[5], eos]), ([1, 2], [10**6, -100])]
    assert labelled_bytes(samples_of(rows), table) == 2


@pytest.mark.parametrize("make", [metaspace_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["ab cd", "a  b"])
def test_of_other_vocabularies_a_space_is_a_byte(make, text):
    tokenizer = make()
    table = bytes_of_tokens(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    by_hand = [
        1 if token.startswith("<0x") else len(token.replace("\u2581", " ").encode()) for token in tokens
    ]
    assert table[ids].tolist() == by_hand
    # The space that such a tokenizer puts in front of a text is one of the tokens'.
    assert sum(by_hand) - len(text.encode()) in (0, 1)


def test_nothing_labelled_is_nothing():
    table = np.ones(4, np.int64)
    assert labelled_bytes(samples_of([([1, 2], [-100, -100])]), table) == labelled_bytes([], table) == 0
