"""megatron-core reads what we write, we read what it writes, bit for bit."""

import numpy as np
import pytest
from data_indexed.megatron_peer import run_megatron

from shardyard.data.indexed import IndexedReader, IndexedWriter, merge

TEXT = [[[5, 6, 0]], [[7, 0]], [[8, 9, 10, 11, 0]]]
SENTENCES = [[[5, 6], [7], [0]], [[3, 2, 1, 0]], [[9, 9], [9, 0]]]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


def flat(documents):
    return [token for document in documents for sequence in document for token in sequence]


def lengths_of(documents):
    return [len(sequence) for document in documents for sequence in document]


def first_sequences(documents):
    return np.cumsum([0, *map(len, documents)]).tolist()


def write(prefix, documents, dtype):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()


def write_with_modes(prefix, documents):
    lengths = np.array(lengths_of(documents))
    with IndexedWriter(prefix, "int32", with_modes=True) as writer:
        writer.append(
            np.array(flat(documents)),
            lengths,
            np.array([len(d) for d in documents]),
            np.arange(len(lengths)) % 3,
        )
        writer.finish()


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Our sets as megatron-core reads them, and the folder of those that it has written."""
    folder = tmp_path_factory.mktemp("exchanged")
    ours, jobs = [], []
    for name, documents in (("text", TEXT), ("sentences", SENTENCES)):
        for dtype in ("uint16", "int32"):
            prefix = folder / f"ours-{name}-{dtype}"
            write(prefix, documents, dtype)
            ours.append((name, dtype))
            jobs.append({"do": "read", "prefix": str(prefix)})
    for dtype in DTYPES:
        for multimodal in (False, True):
            prefix = folder / f"theirs-{dtype}-{multimodal}"
            job = {"prefix": str(prefix), "documents": SENTENCES, "dtype": dtype, "multimodal": multimodal}
            jobs.append({"do": "build", **job})
    jobs.append({"do": "build", "prefix": str(folder / "theirs-text"), "documents": TEXT, "dtype": "uint16"})
    pair = [str(folder / f"ours-{name}-uint16") for name in ("sentences", "text")]
    jobs.append({"do": "build", "prefix": str(folder / "theirs-merged"), "dtype": "uint16", "others": pair})
    write_with_modes(folder / "ours-part", SENTENCES)
    merge([folder / "ours-part"] * 2, folder / "ours-multimodal")
    jobs.append({"do": "read", "prefix": str(folder / "ours-multimodal"), "multimodal": True})
    results = run_megatron(jobs, folder)
    return folder, dict(zip(ours, results, strict=False)), results[-1]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize(("name", "documents"), [("text", TEXT), ("sentences", SENTENCES)])
def test_megatron_reads_our_files(exchanged, name, documents, dtype):
    seen = exchanged[1][name, dtype]
    assert seen["tokens"].dtype == dtype
    assert seen["tokens"].tolist() == flat(documents)
    assert seen["lengths"].tolist() == lengths_of(documents)
    assert seen["document_indices"].tolist() == first_sequences(documents)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_we_read_what_megatron_writes(exchanged, dtype, multimodal):
    reader = IndexedReader(exchanged[0] / f"theirs-{dtype}-{multimodal}")
    assert reader.dtype == dtype
    assert reader.tokens.tolist() == flat(SENTENCES)
    assert reader.sequence_lengths.tolist() == lengths_of(SENTENCES)
    assert reader.document_indices.tolist() == first_sequences(SENTENCES)
    assert [reader.document(d).tolist() for d in range(3)] == [flat([document]) for document in SENTENCES]
    assert [reader.sequence(s).tolist() for s in range(len(reader))] == [q for d in SENTENCES for q in d]
    if multimodal:
        assert reader.modes is not None
        assert reader.modes.tolist() == [
            number % 3 for document in SENTENCES for number in range(len(document))
        ]
    else:
        assert reader.modes is None


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_our_files_are_megatrons_byte_for_byte(exchanged, ending):
    folder = exchanged[0]
    for ours, theirs in (
        ("ours-text-uint16", "theirs-text"),
        ("ours-sentences-uint16", "theirs-uint16-False"),
        ("ours-sentences-int32", "theirs-int32-False"),
    ):
        assert (folder / f"{ours}.{ending}").read_bytes() == (folder / f"{theirs}.{ending}").read_bytes()


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_merge_is_megatrons_byte_for_byte(exchanged, ending):
    folder = exchanged[0]
    merge([folder / "ours-sentences-uint16", folder / "ours-text-uint16"], folder / "ours-merged")
    assert (folder / f"ours-merged.{ending}").read_bytes() == (
        folder / f"theirs-merged.{ending}"
    ).read_bytes()


def test_megatron_reads_the_modes_of_a_merged_multimodal_set(exchanged):
    seen = exchanged[2]
    assert seen["modes"].tolist() == [number % 3 for number in range(len(lengths_of(SENTENCES)))] * 2
    assert seen["tokens"].tolist() == flat(SENTENCES) * 2
