"""Windows over an indexed set: as the raw stream makes them, as a plain loop does, and no token lost."""

import pickle
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.data.indexed import IndexedWriter, WindowSamples, document_order, split_documents
from shardyard.data.pretrain import Documents, Windows
from shardyard.data.types import IGNORE_INDEX
from shardyard.errors import UserError


def write(prefix, documents, dtype="int32"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return prefix


def plain(samples):
    return [(s.input_ids.tolist(), s.labels.tolist(), s.doc_lens) for s in samples]


def of_stream(documents, cutoff_len, reset):
    """What the windows over raw text make of the same documents."""
    windows = Windows(cutoff_len, reset_attention_mask=reset)
    tokens = np.array([token for document in documents for token in document], np.int32)
    lengths = np.array([len(document) for document in documents], np.int32)
    blocks = [windows.push(Documents(tokens, lengths, len(documents), ())), windows.flush()]
    samples = []
    for block in blocks:
        token = doc = 0
        for length, count in zip(block.lengths, block.doc_counts, strict=True):
            ids, labels = block.input_ids[token : token + length], block.labels[token : token + length]
            samples.append((ids.tolist(), labels.tolist(), tuple(block.doc_lens[doc : doc + count].tolist())))
            token, doc = token + length, doc + count
    return samples


def distinct(lengths):
    """Documents of these lengths whose tokens are 1, 2, 3 ... over all of them."""
    ends = np.cumsum(lengths)
    return [list(range(int(end) - n + 1, int(end) + 1)) for n, end in zip(lengths, ends, strict=True)]


def test_by_hand(tmp_path):
    prefix = write(tmp_path / "set", [[5, 6, 0], [[7], [0]], [], [8, 9, 10, 0]])
    samples = WindowSamples(prefix, 4, seed=None, reset_attention_mask=False)
    assert len(samples) == 2
    assert plain(samples) == [([5, 6, 0, 7], [6, 0, 7, 0], (4,)), ([0, 8, 9, 10], [8, 9, 10, 0], (4,))]
    assert samples[0].input_ids.dtype == samples[0].labels.dtype == np.int32
    apart = WindowSamples(prefix, 4, seed=None, reset_attention_mask=True)
    assert plain(apart) == [
        ([5, 6, 0, 7], [6, 0, IGNORE_INDEX, 0], (3, 1)),
        ([0, 8, 9, 10], [IGNORE_INDEX, 9, 10, 0], (1, 3)),
    ]
    longer = WindowSamples(prefix, 5, seed=None, reset_attention_mask=True)
    assert [s.doc_lens for s in longer] == [(3, 2), (3,)]  # a document ends where the window ends
    for index in (2, -1):
        with pytest.raises(IndexError):
            samples[index]


lengths_of_documents = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of_documents, cutoff_len=st.integers(1, 15), reset=st.booleans())
def test_unshuffled_windows_are_those_of_the_raw_stream(lengths, cutoff_len, reset):
    documents = distinct(lengths)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder) / "set", documents, dtype="uint16")
        samples = WindowSamples(prefix, cutoff_len, seed=None, reset_attention_mask=reset)
        assert plain(samples) == of_stream(documents, cutoff_len, reset)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_of_documents,
    cutoff_len=st.integers(1, 15),
    seed=st.integers(0, 2**64),
    reset=st.booleans(),
)
def test_every_token_is_a_target_exactly_once(lengths, cutoff_len, seed, reset):
    documents = distinct(lengths)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder) / "set", documents)
        samples = WindowSamples(prefix, cutoff_len, seed=seed, reset_attention_mask=reset)
        order = document_order(len(documents), seed)
        stream = [token for index in order for token in documents[index]]
        assert len(samples) == -(-(len(stream) - 1) // cutoff_len)
        inputs = [token for sample in samples for token in sample.input_ids.tolist()]
        targets = Counter(token for sample in samples for token in sample.labels.tolist())
        unlabelled = targets.pop(IGNORE_INDEX, 0)
        firsts = {document[0] for document in documents if document}
        wanted = set(stream[1:]) - (firsts if reset else set())
    assert inputs == stream[:-1]  # each token is read once, in order
    assert targets == dict.fromkeys(wanted, 1)
    assert unlabelled == (len(firsts) - 1 if reset else 0)
    for sample in samples:
        assert 1 <= len(sample.input_ids) <= cutoff_len
        assert sum(sample.doc_lens) == len(sample.input_ids) == len(sample.labels)
        assert all(sample.doc_lens)
        if reset:  # tokens are consecutive inside a document, and only there
            ends = np.cumsum(sample.doc_lens)[:-1]
            owner = np.searchsorted([document[-1] for document in documents if document], sample.input_ids)
            assert ends.tolist() == (np.flatnonzero(np.diff(owner)) + 1).tolist()


def test_a_hundred_documents_longer_than_a_window_lose_no_token(tmp_path):
    documents = distinct(np.random.default_rng(1).integers(65, 300, 100))
    samples = WindowSamples(write(tmp_path / "set", documents), 64, seed=3, reset_attention_mask=False)
    total = sum(map(len, documents))
    targets = np.concatenate([sample.labels for sample in samples])
    assert len(targets) == total - 1
    assert len({*targets.tolist(), int(samples[0].input_ids[0])}) == total
    assert {len(sample.input_ids) for sample in list(samples)[:-1]} == {64}


def test_order_of_documents_depends_on_seed_and_stream_only():
    order = document_order(1000, 7)
    assert sorted(order) == list(range(1000))
    assert order.dtype == np.int64
    assert np.array_equal(order, document_order(1000, 7))
    assert not np.array_equal(order, document_order(1000, 8))
    assert not np.array_equal(order, document_order(1000, 7, stream=1))
    # Philox by its definition (Salmon et al. 2011), seeded with numpy's SeedSequence: sort by the words.
    key = np.random.SeedSequence([7, 0x646F6373, 0]).generate_state(2, np.uint64)
    assert np.array_equal(document_order(8, 7), sorted(range(8), key=philox_words(key, 8).__getitem__))


def philox_words(key, count):
    """Philox 4x64-10: ten rounds of two multiplications over a counter of four words."""
    mask, words = 2**64 - 1, []
    for block in range(1, count // 4 + 1):
        c, k = [block, 0, 0, 0], [int(key[0]), int(key[1])]
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
            high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
            c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        words += c
    return words


def test_a_range_of_documents_is_a_set_of_its_own(tmp_path):
    documents = distinct([3, 0, 4, 2, 5, 1])
    prefix = write(tmp_path / "set", documents)
    part = WindowSamples(prefix, 4, seed=None, reset_attention_mask=True, first=2, last=5)
    assert plain(part) == of_stream(documents[2:5], 4, reset=True)
    assert part.num_tokens == 11
    shuffled = WindowSamples(prefix, 4, seed=1, reset_attention_mask=False, first=2, last=5)
    read = np.concatenate([shuffled[0].input_ids[:1], *(sample.labels for sample in shuffled)])
    assert sorted(read) == [token for document in documents[2:5] for token in document]


@pytest.mark.parametrize("documents", [[[1]], [[], [1], []]])
def test_a_single_token_makes_no_sample(tmp_path, documents):
    assert len(WindowSamples(write(tmp_path / "set", documents), 4, seed=0, reset_attention_mask=False)) == 0


def test_no_documents_make_no_sample(tmp_path):
    prefix = write(tmp_path / "set", [[1, 2, 3]])
    assert len(WindowSamples(prefix, 4, seed=0, reset_attention_mask=False, first=1)) == 0


def test_another_process_rebuilds_the_same_samples(tmp_path):
    prefix = write(tmp_path / "set", distinct([5] * 2000))
    samples = WindowSamples(prefix, 16, seed=5, reset_attention_mask=True, first=10, last=1500, stream=2)
    sent = pickle.dumps(samples)
    assert len(sent) < 400
    assert plain(pickle.loads(sent)) == plain(samples)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("98,1,1", [(0, 98), (98, 99), (99, 100)]),
        ("100,0,0", [(0, 100), None, None]),
        ("1", [(0, 100), None, None]),
        ("1,1", [(0, 50), (50, 100), None]),
        ("0.9/0/0.1", [(0, 90), None, (90, 100)]),
        ("1,1,1", [(0, 33), (33, 67), (67, 100)]),
        ("969,30,1", [(0, 97), (97, 100), (100, 100)]),
    ],
)
def test_split_of_a_hundred_documents(split, expected):
    parts = [
        (part.start, part.stop) if len(part) or wanted else None
        for part, wanted in zip(split_documents(split, 100), expected, strict=True)
    ]
    assert parts == expected


def test_split_rounds_half_to_even():
    assert split_documents("1,1", 5).train == range(2)  # 2.5
    assert split_documents("1,1", 7).train == range(4)  # 3.5


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,2,3,4", "-1,2"])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(UserError, match=r'data.split: "'):
        split_documents(split, 10)
