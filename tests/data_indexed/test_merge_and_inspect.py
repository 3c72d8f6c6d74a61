"""``merge`` keeps every document, ``inspect`` counts what is there."""

import json

import numpy as np
import pytest

from shardyard.data.indexed import IndexedReader, IndexedWriter, inspect, merge
from shardyard.errors import UserError

A = [[[1, 2], [3]], [[4], [5, 6, 7]]]
B = [[[8, 9]]]


def write(prefix, documents, dtype="uint16", modes=None):
    with IndexedWriter(prefix, dtype, with_modes=modes is not None) as writer:
        if modes is None:
            for document in documents:
                writer.add_document(document)
        else:
            sequences = [sequence for document in documents for sequence in document]
            writer.append(
                np.concatenate(sequences),
                np.array([len(sequence) for sequence in sequences]),
                np.array([len(document) for document in documents]),
                np.array(modes),
            )
        writer.finish()
    return prefix


def documents_of(prefix):
    """Each document as its sequences."""
    reader = IndexedReader(prefix, allow_empty=True)
    bounds = reader.document_indices
    return [
        [reader.sequence(s).tolist() for s in range(bounds[d], bounds[d + 1])]
        for d in range(reader.num_documents)
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [("ab", A + B), ("ba", B + A), ("aeb", A + B), ("ea", A), ("ae", A), ("e", []), ("aab", A + A + B)],
)
def test_documents_of_a_merge_are_those_of_its_parts(tmp_path, names, expected):
    for name, documents in (("a", A), ("b", B), ("e", [])):
        write(tmp_path / name, documents)
    merge([tmp_path / name for name in names], tmp_path / "all")
    assert documents_of(tmp_path / "all") == expected
    tokens = [token for document in expected for sequence in document for token in sequence]
    assert IndexedReader(tmp_path / "all", allow_empty=True).tokens.tolist() == tokens


def test_a_merge_in_many_pieces_keeps_every_document(tmp_path):
    """Copied 2^16 documents at a time: 70,000 and 66,000 cross that."""
    lengths = np.random.default_rng(0).integers(0, 4, 70_000)
    for name, part in (("a", lengths), ("b", lengths[:66_000])):
        with IndexedWriter(tmp_path / name, "int32") as writer:
            writer.add_documents(np.arange(part.sum()), part)
            writer.finish()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    merged = IndexedReader(tmp_path / "all")
    assert merged.sequence_lengths.tolist() == [*lengths, *lengths[:66_000]]
    assert merged.document_indices.tolist() == list(range(136_001))
    assert np.array_equal(
        merged.tokens, np.concatenate([np.arange(lengths.sum()), np.arange(lengths[:66_000].sum())])
    )


def test_modes_are_kept(tmp_path):
    write(tmp_path / "a", A, modes=[0, 1, 2, 1])
    write(tmp_path / "b", B, modes=[7])
    write(tmp_path / "e", [])
    merge([tmp_path / "e", tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    reader = IndexedReader(tmp_path / "all")
    assert reader.modes is not None
    assert reader.modes.tolist() == [0, 1, 2, 1, 7]
    assert documents_of(tmp_path / "all") == A + B


def test_what_does_not_fit_together_is_refused_and_nothing_is_written(tmp_path):
    a = write(tmp_path / "a", A)
    wide = write(tmp_path / "wide", B, dtype="int32")
    modes = write(tmp_path / "modes", B, modes=[1])
    before = sorted(tmp_path.iterdir())
    for prefixes, out, message in (
        ([a, wide], "all", r"a holds uint16 ids and .*wide int32 ids"),
        ([a, modes], "all", r"modes is a multimodal set with modes, .*a has none"),
        ([a, a], "a", "a is one of the sets to merge"),
        ([a, tmp_path / "absent"], "all", "absent.idx is missing"),
        ([], "all", "at least one"),
    ):
        with pytest.raises(UserError, match=message):
            merge(prefixes, tmp_path / out)
    assert sorted(tmp_path.iterdir()) == before


def test_inspect_by_hand(tmp_path):
    documents = [[5, 0], [0], [], [1, 2, 3, 0], [1, 2, 3, 4, 5, 6, 7], [9, 0]]
    summary = inspect(write(tmp_path / "set", documents), num_heads=2, head_tokens=1)
    assert (summary.documents, summary.sequences, summary.tokens) == (6, 6, 16)
    assert (summary.shortest, summary.longest, summary.median) == (0, 7, 2.0)
    assert summary.mean == pytest.approx(16 / 6)
    assert [(b.shortest, b.longest, b.documents) for b in summary.histogram] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 2),
    ]
    assert (summary.last_id, summary.documents_ending_so) == (0, 4)
    assert [(h.index, h.length, h.ids, h.text) for h in summary.heads] == [
        (0, 2, (5,), None),
        (1, 1, (0,), None),
    ]
    assert (summary.dtype, summary.multimodal) == ("uint16", False)


def test_inspect_shows_text_and_survives_json(tmp_path):
    prefix = write(tmp_path / "set", [[8, 9, 0], [10, 0]])
    summary = inspect(prefix, lambda ids: "".join(chr(96 + i) for i in ids if i), num_heads=5)
    assert [head.text for head in summary.heads] == ["hi", "j"]
    text = summary.to_text()
    assert "documents 2   sequences 2   tokens 5" in text
    assert "document 0 (3 tokens): 'hi'" in text
    assert json.loads(json.dumps(summary.to_json()))["heads"][1] == {
        "index": 1,
        "length": 2,
        "ids": [10, 0],
        "text": "j",
    }


def test_inspect_of_an_empty_set(tmp_path):
    summary = inspect(write(tmp_path / "set", []))
    assert (summary.documents, summary.tokens, summary.longest, summary.histogram) == (0, 0, 0, ())
    assert "documents 0" in summary.to_text()
