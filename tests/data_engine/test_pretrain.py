"""Pretraining windows, by hand and against a plain loop over the token stream."""

import numpy as np
import pytest

from shardyard.data.batches import collate
from shardyard.data.pretrain import Documents, DocumentTokenizer, Windows
from shardyard.data.types import Sample
from shardyard.errors import UserError

EOD = 0  # an id that is false in Python


class LetterTokenizer:
    """a=1, b=2, ...; puts ``bos`` first and, if told, its eos last."""

    def __init__(self, bos=None, adds_eos=False, eos_token_id=EOD):
        self.eos_token_id = eos_token_id
        self._bos = [] if bos is None else [bos]
        self._eos = [EOD] if adds_eos else []

    def __call__(self, texts, return_attention_mask, verbose):
        return {"input_ids": [[*self._bos, *(ord(c) - 96 for c in t), *self._eos] for t in texts]}


def documents(*docs):
    return Documents(
        np.array([t for doc in docs for t in doc], np.int32),
        np.array([len(doc) for doc in docs], np.int32),
        len(docs),
        (),
    )


def unpack(block):
    samples, token, doc = [], 0, 0
    for length, count in zip(block.lengths, block.doc_counts, strict=True):
        samples.append(
            (
                block.input_ids[token : token + length].tolist(),
                block.labels[token : token + length].tolist(),
                tuple(block.doc_lens[doc : doc + count].tolist()),
            )
        )
        token, doc = token + length, doc + count
    assert token == len(block.input_ids)
    assert doc == len(block.doc_lens)
    return samples


def cut(batches, cutoff_len, reset=False):
    windows = Windows(cutoff_len, reset_attention_mask=reset)
    samples = [sample for batch in batches for sample in unpack(windows.push(documents(*batch)))]
    return samples + unpack(windows.flush())


def plain_loop(docs, cutoff_len, reset=False):
    stream = [token for doc in docs for token in doc]
    owner = [number for number, doc in enumerate(docs) for _ in doc]
    samples = []
    for begin in range(0, len(stream) - 1, cutoff_len):
        positions = range(begin, min(begin + cutoff_len, len(stream) - 1))
        labels, doc_lens = [], []
        for place, t in enumerate(positions):
            same = owner[t] == owner[t + 1]
            labels.append(stream[t + 1] if same or not reset else -100)
            if place == 0 or (reset and owner[t] != owner[t - 1]):
                doc_lens.append(0)
            doc_lens[-1] += 1
        samples.append(([stream[t] for t in positions], labels, tuple(doc_lens)))
    return samples


def test_three_documents_by_hand():
    docs = [[5, 6, 0], [7, 0], [8, 9, 10, 0]]
    assert cut([docs], 4) == [
        ([5, 6, 0, 7], [6, 0, 7, 0], (4,)),
        ([0, 8, 9, 10], [8, 9, 10, 0], (4,)),
    ]
    assert cut([docs], 3) == [
        ([5, 6, 0], [6, 0, 7], (3,)),
        ([7, 0, 8], [0, 8, 9], (3,)),
        ([9, 10], [10, 0], (2,)),
    ]


def test_three_documents_by_hand_with_segments():
    docs = [[5, 6, 0], [7, 0], [8, 9, 10, 0]]
    samples = cut([docs], 4, reset=True)
    assert samples == [
        ([5, 6, 0, 7], [6, 0, -100, 0], (3, 1)),
        ([0, 8, 9, 10], [-100, 9, 10, 0], (1, 3)),
    ]
    window = collate([Sample(*map(np.array, samples[0][:2]), samples[0][2])], [0], filler_token=0)
    assert window.position_ids.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cutoff_len", [1, 2, 3, 7, 64])
def test_windows_equal_a_plain_loop_however_the_documents_arrive(cutoff_len, reset):
    generator = np.random.default_rng(cutoff_len)
    docs = [generator.integers(0, 90, size=size).tolist() for size in generator.integers(1, 12, size=30)]
    expected = plain_loop(docs, cutoff_len, reset)
    for batch in (1, 4, 30):
        batches = [docs[begin : begin + batch] for begin in range(0, 30, batch)]
        assert cut(batches, cutoff_len, reset) == expected


def test_every_token_but_the_first_is_a_target_once():
    docs = [list(range(10 * n, 10 * n + 1 + n)) for n in range(6)]
    stream = [token for doc in docs for token in doc]
    assert [label for _, labels, _ in cut([docs], 5) for label in labels] == stream[1:]
    inside = [token for doc in docs for token in doc[1:]]
    trained = [x for _, labels, _ in cut([docs], 5, reset=True) for x in labels if x != -100]
    assert trained == inside


def test_less_than_two_tokens_make_no_window():
    assert cut([], 4) == cut([[[3]]], 4) == []
    assert cut([[[1, 2, 3, 4, 5]]], 4) == [([1, 2, 3, 4], [2, 3, 4, 5], (4,))]


def test_the_end_of_document_token_comes_once():
    batch = [("ab", "f:1"), ("c", "f:2")]
    for adds_eos in (False, True):
        work = DocumentTokenizer(
            LetterTokenizer(adds_eos=adds_eos), append_eod=True, split_special_tokens=False
        )
        assert work(batch).tokens.tolist() == [1, 2, EOD, 3, EOD]
        assert work(batch).lengths.tolist() == [3, 2]
    work = DocumentTokenizer(LetterTokenizer(bos=9), append_eod=False, split_special_tokens=False)
    assert work(batch).tokens.tolist() == [9, 1, 2, 9, 3]


def test_empty_documents_are_dropped_wherever_they_are():
    batch = [("", "f:1"), ("a", "f:2"), (" \n", "f:3"), ("b", "f:4"), ("", "f:5")]
    outcome = DocumentTokenizer(LetterTokenizer(), append_eod=True, split_special_tokens=False)(batch)
    assert outcome.tokens.tolist() == [1, EOD, 2, EOD]
    assert outcome.rows == 5
    assert outcome.dropped == [("empty document", place) for place in ("f:1", "f:3", "f:5")]


def test_append_eod_needs_an_eos_token():
    with pytest.raises(UserError, match=r"data\.append_eod"):
        DocumentTokenizer(LetterTokenizer(eos_token_id=None), append_eod=True, split_special_tokens=False)
