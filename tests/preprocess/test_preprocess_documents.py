"""Texts to indexed documents: the ids, the end token, what is dropped, any number of processes."""

from __future__ import annotations

import csv
import gzip
import json
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.tokenizers import byte_tokenizer

from shardyard.data.preprocess import batches, texts, write_documents
from shardyard.data.sources import resolve_datasets
from shardyard.errors import UserError

WORDS = ["alpha", "in", "the", "Ünï", "中文", "tea", "42", "<|im_end|>", "\t", "end"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def some_texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 40))).strip() or "x" for _ in range(count)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def entry_of(*paths, **described):
    return resolve_datasets({"file_name": [str(path) for path in paths], **described}, ".")[0]


def read_back(prefix):
    """Type code, documents and the size of .bin, from the bytes of the files alone."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    data = prefix.with_name(prefix.name + ".bin").read_bytes()
    magic, version, code, sequences, indices = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, indices) == (b"MMIDIDX\0\0", 1, sequences + 1)
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, "<i8", indices, 34 + 12 * sequences)
    dtype = {4: np.dtype("<i4"), 8: np.dtype("<u2")}[code]
    assert documents.tolist() == list(range(sequences + 1))
    assert int(lengths.sum()) * dtype.itemsize == len(data)
    found = [
        np.frombuffer(data, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths.tolist(), pointers.tolist(), strict=True)
    ]
    return dtype, found


def expected_documents(tokenizer, rows, eod):
    documents = []
    for text in rows:
        ids = tokenizer(text)["input_ids"]
        documents.append(ids if ids[-1] == eod else [*ids, eod])
    return documents


def test_each_document_has_its_own_ids_and_ends_once(tmp_path, tokenizer):
    rows = [*some_texts(50), "ends itself<|endoftext|>", "in the middle<|endoftext|> and on", "<|endoftext|>"]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in rows])
    report = write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1)
    dtype, found = read_back(tmp_path / "out")
    assert found == expected_documents(tokenizer, rows, tokenizer.eos_token_id)
    assert dtype == np.dtype("<u2") and report.dtype == "uint16"
    assert report.documents == report.rows == 53
    assert report.tokens == sum(map(len, found))
    assert report.longest == max(map(len, found))
    assert report.largest_id == max(map(max, found))
    assert report.counts == {"documents that ended with the end-of-document token already": 2}


def test_without_append_eod_documents_are_their_text_alone(tmp_path, tokenizer):
    rows = some_texts(20)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in rows])
    write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=False, workers=1)
    assert read_back(tmp_path / "out")[1] == [tokenizer(text)["input_ids"] for text in rows]


def test_a_large_vocabulary_makes_int32_ids(tmp_path):
    tokenizer = byte_tokenizer(special=("<|endoftext|>", *(f"<{n}>" for n in range(65_500))))
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a<65499>"}])
    report = write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1)
    dtype, found = read_back(tmp_path / "out")
    assert dtype == np.dtype("<i4") and report.dtype == "int32"
    assert found == [[tokenizer.get_vocab()["a"], 65_500, 0]]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "txt", "json", "csv", "parquet"])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, tokenizer, monkeypatch, kind):
    rows = some_texts(600, seed=1)
    path = tmp_path / f"rows.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(rows), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in rows]), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in rows)])
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=100)
    else:
        write_jsonl(path, [{"text": text} for text in rows])
        if kind == "jsonl.gz":
            path.write_bytes(gzip.compress(path.read_bytes()))
    outputs = []
    for workers, batch_bytes in ((1, 1 << 19), (2, 2000), (3, 777)):
        monkeypatch.setattr(batches, "BATCH_BYTES", batch_bytes)
        prefix = tmp_path / f"out{workers}"
        report = write_documents(entry_of(path), tokenizer, prefix, append_eod=True, workers=workers)
        outputs.append(prefix.with_name(prefix.name + ".bin").read_bytes())
        outputs.append(prefix.with_name(prefix.name + ".idx").read_bytes())
        assert report.documents == 600
    assert outputs[:2] == outputs[2:4] == outputs[4:]
    assert read_back(tmp_path / "out3")[1] == expected_documents(tokenizer, rows, tokenizer.eos_token_id)


def test_documents_without_text_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"text": ""}, {"text": "a"}, {"text": " \n\t"}, {"text": None}, {"text": "b"}, {"text": "\u3000"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    report = write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1)
    assert report.dropped == {"empty document": (4, f"{path}:1")}
    assert report.rows == 6 and report.documents == 2
    assert read_back(tmp_path / "out")[1] == expected_documents(tokenizer, ["a", "b"], tokenizer.eos_token_id)


def test_half_a_surrogate_pair_is_dropped_and_counted(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad \\ud800"}\n', encoding="utf-8")
    report = write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=False, workers=1)
    assert report.documents == 1
    assert report.dropped == {texts.INVALID_UNICODE: (1, f"{path}:2")}


def test_nothing_left_to_write_is_an_error_with_the_reasons(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}])
    with pytest.raises(
        UserError, match=r"none of 1 rows is left to write; empty document: 1 \(first: .*:1\)"
    ):
        write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.jsonl"]


BAD = (
    b'{"text": "one"}\n\n{"text": "two"}{"text": "three"}\n{"text": 4}\n[5]\n'
    b'{"other": "6"}\n\xff\n{"text": "7"}\n'
)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_stops_with_its_place(tmp_path, tokenizer, workers):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BAD)
    with pytest.raises(UserError, match=r"rows\.jsonl:3: not valid JSON"):
        write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=workers)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.jsonl"]


def test_bad_rows_are_skipped_and_counted_if_asked(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BAD)
    report = write_documents(
        entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1, on_bad_row="skip"
    )
    assert report.documents == 2 and report.rows == 7
    assert {
        reason: (count, first.rsplit(":", 1)[1]) for reason, (count, first) in report.dropped.items()
    } == {
        "not valid JSON": (1, "3"),
        "column 'text' must hold text": (1, "4"),
        "not an object": (1, "5"),
        "no column 'text'": (1, "6"),
        "not UTF-8 text": (1, "7"),
    }


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("wanted", [1, 7, 100])
def test_max_documents_takes_the_first_rows(tmp_path, tokenizer, monkeypatch, kind, wanted):
    monkeypatch.setattr(batches, "BATCH_BYTES", 64)
    rows = some_texts(30, seed=2)
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n \n".join(json.dumps({"text": text}) for text in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps([{"text": text} for text in rows]), encoding="utf-8")
    report = write_documents(
        entry_of(path), tokenizer, tmp_path / "out", append_eod=False, workers=1, max_documents=wanted
    )
    assert report.rows == min(wanted, 30)
    assert read_back(tmp_path / "out")[1] == [tokenizer(text)["input_ids"] for text in rows[:wanted]]


def test_byte_order_mark_carriage_returns_and_a_cut_last_line(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b\xe2\x80\xa8c"}')
    write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=False, workers=1)
    assert read_back(tmp_path / "out")[1] == [tokenizer(text)["input_ids"] for text in ("a", "b\u2028c")]


def test_special_tokens_in_the_text_are_split_if_asked(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a<|im_end|>"}])
    write_documents(
        entry_of(path), tokenizer, tmp_path / "out", append_eod=True, workers=1, split_special_tokens=True
    )
    vocabulary = tokenizer.get_vocab()
    letters = [vocabulary[letter] for letter in "a<|im_end|>"]
    assert read_back(tmp_path / "out")[1] == [[*letters, tokenizer.eos_token_id]]
    write_documents(entry_of(path), tokenizer, tmp_path / "out2", append_eod=True, workers=1)
    assert read_back(tmp_path / "out2")[1] == [[vocabulary["a"], vocabulary["<|im_end|>"], 2]]


def test_a_tokenizer_whose_call_differs_from_its_library_is_called(tokenizer):
    class Shouting:
        def __init__(self):
            self.eos_token = tokenizer.eos_token
            self.backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, given, **options):
            given = given.upper() if isinstance(given, str) else [text.upper() for text in given]
            return tokenizer(given, **options)

    plain = texts.TextEncoder(tokenizer, split_special_tokens=False)
    shouting = texts.TextEncoder(Shouting(), split_special_tokens=False)
    assert plain.is_direct and not shouting.is_direct
    assert shouting(["abc"]) == [tokenizer("ABC")["input_ids"]]
    assert plain(["abc", "in"]) == [tokenizer("abc")["input_ids"], tokenizer("in")["input_ids"]]


def test_padding_and_truncation_left_on_in_the_tokenizer_do_not_reach_the_ids(tokenizer):
    other = byte_tokenizer()
    other.backend_tokenizer.enable_truncation(3)
    other.backend_tokenizer.enable_padding(length=9)
    encode = texts.TextEncoder(other, split_special_tokens=False)
    assert encode.is_direct
    assert encode(["abcdef"]) == [tokenizer("abcdef")["input_ids"]]


def test_append_eod_needs_an_eos_token(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match="append_eod: the tokenizer has no eos token"):
        write_documents(
            entry_of(path), byte_tokenizer(eos=None), tmp_path / "out", append_eod=True, workers=1
        )


def test_one_long_document_stays_whole(tmp_path, tokenizer):
    text = "tea " * 200_000
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": text}, {"text": "b"}])
    write_documents(entry_of(path), tokenizer, tmp_path / "out", append_eod=False, workers=2)
    lengths = [len(document) for document in read_back(tmp_path / "out")[1]]
    assert lengths == [1, len(tokenizer(text)["input_ids"]), 1]
