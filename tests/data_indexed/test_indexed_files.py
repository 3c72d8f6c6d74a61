"""The .bin/.idx pair: written complete or absent, read by views, every damage found at open and named."""

import multiprocessing
import os
import pickle
import signal
import struct
import time

import numpy as np
import pytest

from shardyard.data.indexed import IndexedReader, IndexedWriter, bin_path, dtype_for, idx_path
from shardyard.errors import UserError

DOCUMENTS = [[[5, 6, 0]], [[7], [8, 9, 0]], [[]], [[10, 0]]]
TOKENS = [5, 6, 0, 7, 8, 9, 0, 10, 0]
LENGTHS = [3, 1, 3, 0, 2]


def write(prefix, documents=DOCUMENTS, dtype="uint16"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return prefix


def idx_bytes(lengths, pointers, documents, *, magic=b"MMIDIDX\0\0", version=1, code=8, counts=None):
    """The index by the format's description, field by field."""
    sequences, indices = counts or (len(lengths), len(documents))
    return b"".join(
        [
            magic,
            struct.pack("<Q", version),
            struct.pack("<B", code),
            struct.pack("<QQ", sequences, indices),
            *(struct.pack("<i", n) for n in lengths),
            *(struct.pack("<q", n) for n in pointers),
            *(struct.pack("<q", n) for n in documents),
        ]
    )


def test_files_are_as_the_format_describes_them(tmp_path):
    prefix = write(tmp_path / "set.v1")  # a dot in the name is no suffix
    assert (tmp_path / "set.v1.bin").read_bytes() == struct.pack("<9H", *TOKENS)
    assert (tmp_path / "set.v1.idx").read_bytes() == idx_bytes(LENGTHS, [0, 6, 8, 14, 14], [0, 1, 3, 4, 5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.v1.bin", "set.v1.idx"]
    assert bin_path(prefix).stat().st_size == sum(LENGTHS) * 2


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_what_was_written_is_read(tmp_path, dtype):
    reader = IndexedReader(write(tmp_path / "set", dtype=dtype))
    assert (len(reader), reader.num_documents, reader.num_tokens) == (5, 4, 9)
    assert reader.dtype == dtype
    assert reader.sequence_lengths.tolist() == LENGTHS
    assert reader.document_indices.tolist() == [0, 1, 3, 4, 5]
    assert reader.modes is None
    assert [reader.document(d).tolist() for d in range(4)] == [[5, 6, 0], [7, 8, 9, 0], [], [10, 0]]
    assert reader.sequence(2).tolist() == [8, 9, 0]
    assert reader.sequence(2, offset=1).tolist() == [9, 0]
    assert reader.sequence(2, offset=1, length=1).tolist() == [9]
    assert reader.document_offsets().tolist() == [0, 3, 7, 7, 9]
    assert reader.document_offsets(1, 3).tolist() == [3, 7, 7]
    assert reader.sequence(0).base is not None  # a view, not a copy
    assert reader.largest_id() == 10
    reader.check_ids(11)
    with pytest.raises(UserError, match=r"set.bin holds the token id 10, .* vocabulary ends at 9"):
        reader.check_ids(10)
    for wrong in (lambda: reader.sequence(5), lambda: reader.sequence(0, 2, 2), lambda: reader.document(-1)):
        with pytest.raises(IndexError):
            wrong()


def test_documents_in_bulk_are_those_one_by_one(tmp_path):
    one_by_one = write(tmp_path / "a", [[1, 2, 3], np.array([4]), [], [5, 6]])
    with IndexedWriter(tmp_path / "b", "uint16") as writer:
        writer.add_documents(np.array([1, 2, 3, 4], np.int64), np.array([3, 1, 0], np.int32))
        writer.add_documents(np.array([5, 6], np.uint16), np.array([2]))
        assert (writer.num_documents, writer.num_sequences, writer.num_tokens) == (4, 4, 6)
        writer.finish()
    for path in (bin_path, idx_path):
        assert path(one_by_one).read_bytes() == path(tmp_path / "b").read_bytes()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (151_936, "int32")])
def test_type_follows_the_vocabulary_as_megatrons_does(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype


def test_pointers_go_beyond_four_gigabytes(tmp_path):
    """Sparse: 5 x 2^30 tokens of int32 that were never written are zeros."""
    lengths = [2**30] * 5
    (tmp_path / "set.idx").write_bytes(idx_bytes(lengths, [n * 2**32 for n in range(5)], range(6), code=4))
    with (tmp_path / "set.bin").open("wb") as file:
        file.truncate(5 * 2**32)
        file.seek(4 * 2**32)
        file.write(struct.pack("<3i", 7, 8, 9))
    reader = IndexedReader(tmp_path / "set")
    assert reader.num_tokens == 5 * 2**30
    assert reader.sequence(4, length=4).tolist() == [7, 8, 9, 0]


def test_written_pointers_do_not_overflow_where_lengths_add_up_beyond_int32(tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        writer._lengths.extend([2**31 - 1] * 3)  # as if so many tokens had gone to .bin
        writer._sequence_counts.extend([1] * 3)
        writer.finish()
    pointers = np.frombuffer((tmp_path / "set.idx").read_bytes(), "<i8", 3, 34 + 3 * 4)
    assert pointers.tolist() == [0, 2 * (2**31 - 1), 4 * (2**31 - 1)]


def test_ids_that_do_not_fit_are_refused(tmp_path):
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        with pytest.raises(UserError, match="token id 65536 does not fit uint16"):
            writer.add_document([1, 65536])
        with pytest.raises(UserError, match="token id -1 does not fit uint16"):
            writer.add_documents(np.array([-1]), np.array([1]))
        with pytest.raises(ValueError, match="do not fit together"):
            writer.add_documents(np.array([1, 2]), np.array([1]))
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_finish_leaves_nothing_and_an_older_set_stays(tmp_path):
    write(tmp_path / "set", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "set", "uint16") as writer:
        writer.add_document([3])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]
    assert IndexedReader(tmp_path / "set").document(0).tolist() == [1, 2]
    write(tmp_path / "set", [[3]])
    assert IndexedReader(tmp_path / "set").document(0).tolist() == [3]


def _write_and_wait(prefix):
    writer = IndexedWriter(prefix, "uint16")
    writer.add_document([1, 2, 3])
    (prefix.parent / "ready").touch()
    time.sleep(60)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_and_wait, args=(tmp_path / "set",))
    process.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (tmp_path / "ready").unlink()
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"]  # under its temporary name
    with pytest.raises(UserError, match=r"set.idx is missing"):
        IndexedReader(tmp_path / "set")
    with IndexedWriter(tmp_path / "set", "uint16"), IndexedWriter(tmp_path / "set", "uint16"):
        assert len(list(tmp_path.iterdir())) == 2  # the dead process's is gone, those of living writers stay
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/set.bin and its index"):
        IndexedWriter(tmp_path / "file" / "set", "uint16")


def test_another_process_gets_the_path_only(tmp_path):
    reader = IndexedReader(write(tmp_path / "set", [[*range(2000)]]))
    sent = pickle.dumps(reader)
    assert len(sent) < 300
    assert pickle.loads(sent).document(0).tolist() == list(range(2000))


GOOD = {"lengths": [3, 2], "pointers": [0, 6], "documents": [0, 1, 2]}
DAMAGE = {
    "magic": ({"magic": b"MMIDXID\0\0"}, "set.idx is no index of Megatron's format"),
    "version": ({"version": 2}, "set.idx is of version 2"),
    "unknown type": ({"code": 9}, "set.idx is damaged: 9 is no code of a type"),
    "float type": ({"code": 7}, "set.idx describes float32 values"),
    "more sequences than bytes": (
        {"counts": (3, 3)},
        "set.idx is damaged: 3 sequences and 3 document indices need",
    ),
    "absurd count": ({"counts": (2**63, 3)}, "set.idx is damaged: 9223372036854775808 sequences"),
    "negative length": ({"lengths": [3, -2]}, "set.idx is damaged: sequence 1 has a length of -2"),
    "pointers with a gap": ({"pointers": [0, 8]}, "sequence 1 is said to begin at byte 8 .* end at 6"),
    "pointers that descend": ({"pointers": [6, 0]}, "sequence 0 is said to begin at byte 6 .* end at 0"),
    "pointer outside": ({"pointers": [0, 2**40]}, "sequence 1 is said to begin at byte 1099511627776"),
    "sizes that disagree": (
        {"lengths": [3, 3]},
        r"set.bin .* describes 12 bytes \(6 tokens of 2\), it has 10",
    ),
    "another item size": (
        {"code": 4, "pointers": [0, 12]},
        r"describes 20 bytes \(5 tokens of 4\), it has 10",
    ),
    "documents begin late": ({"documents": [1, 1, 2]}, "document index does not begin with sequence 0"),
    "documents descend": ({"documents": [0, 2, 1, 2]}, "document 1 begins at sequence 2, the next one at 1"),
    "documents end early": ({"documents": [0, 1]}, "document index ends at sequence 1 of 2"),
    "documents end late": ({"documents": [0, 1, 3]}, "document index ends at sequence 3 of 2"),
    "no document index": ({"documents": []}, "document index does not begin with sequence 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_index_is_found_at_open(tmp_path, damage):
    change, message = DAMAGE[damage]
    (tmp_path / "set.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    (tmp_path / "set.idx").write_bytes(idx_bytes(**GOOD))
    assert IndexedReader(tmp_path / "set").document(1).tolist() == [4, 5]
    (tmp_path / "set.idx").write_bytes(idx_bytes(**{**GOOD, **change}))
    with pytest.raises(UserError, match=message) as error:
        IndexedReader(tmp_path / "set")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [0, 1, 33, 34, 40, -9, -1])
def test_a_truncated_index_is_found_at_open(tmp_path, cut):
    prefix = write(tmp_path / "set")
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:cut])
    with pytest.raises(UserError, match=r"set.idx is damaged: .*(header|need 134 bytes)"):
        IndexedReader(prefix)


def test_bytes_after_the_index_are_found_at_open(tmp_path):
    prefix = write(tmp_path / "set")
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes() + b"\0\0")
    with pytest.raises(UserError, match=r"need 134 bytes \(139 with modes\), it has 136"):
        IndexedReader(prefix)


@pytest.mark.parametrize("cut", [0, 1, 17])
def test_a_truncated_bin_is_found_at_open_with_both_sizes(tmp_path, cut):
    prefix = write(tmp_path / "set")
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:cut])
    with pytest.raises(UserError, match=rf"set.bin .* describes 18 bytes .*, it has {cut};"):
        IndexedReader(prefix)


def test_damage_far_into_a_large_index_is_found(tmp_path):
    """Checks run in pieces of 2^20 entries; the damage lies in the second one and at the seam."""
    count = 2**20 + 5
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        writer.add_documents(np.ones(count, np.uint16), np.ones(count, np.int32))
        writer.finish()
    reader = IndexedReader(tmp_path / "set")
    assert reader.document_offsets(count - 2).tolist() == [count - 2, count - 1, count]
    sound = idx_path(tmp_path / "set").read_bytes()
    pointers, documents = 34 + 4 * count, 34 + 12 * count
    for place, name in (
        (pointers + 8 * (2**20 + 1), "sequence 1048577"),
        (documents + 8 * 2**20, "document 1048575"),
    ):
        damaged = bytearray(sound)
        damaged[place : place + 8] = struct.pack("<q", 3)
        idx_path(tmp_path / "set").write_bytes(damaged)
        with pytest.raises(UserError, match=name):
            IndexedReader(tmp_path / "set")


@pytest.mark.parametrize(
    ("missing", "message"), [("bin", "set.bin is missing"), ("idx", "set.idx is missing")]
)
def test_a_missing_partner_is_named(tmp_path, missing, message):
    prefix = write(tmp_path / "set")
    (tmp_path / f"set.{missing}").unlink()
    with pytest.raises(UserError, match=rf"{message} \(set.... is there\)"):
        IndexedReader(prefix)
    with pytest.raises(UserError, match=r"other.idx is missing \(nor is other.bin\)"):
        IndexedReader(tmp_path / "other")


@pytest.mark.parametrize("documents", [[], [[]], [[[], []]]])
def test_a_set_without_tokens_is_refused_unless_asked_for(tmp_path, documents):
    prefix = write(tmp_path / "set", documents)
    with pytest.raises(UserError, match=r"set.bin holds no token"):
        IndexedReader(prefix)
    reader = IndexedReader(prefix, allow_empty=True)
    assert reader.num_documents == len(documents)
    assert reader.largest_id() == -1
    assert pickle.loads(pickle.dumps(reader)).num_tokens == 0


def test_negative_ids_of_a_signed_set_are_no_token_ids(tmp_path):
    reader = IndexedReader(write(tmp_path / "set", [[1, 2, -5, 3]], dtype="int32"))
    with pytest.raises(UserError, match=r"set.bin holds -5 as token 2"):
        reader.check_ids(100)
