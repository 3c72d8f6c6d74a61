"""Samples packed for training: written, read back, and equal to what fine-tuning itself would train on."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from support.tokenizers import CHATML, QWEN3_LIKE, byte_tokenizer

from shardyard.data import sources
from shardyard.data.converters import convert, convert_pair
from shardyard.data.encode import Encoder
from shardyard.data.indexed import IndexedReader, IndexedWriter
from shardyard.data.preprocess import Job, PackedSamples, run_job, sinks
from shardyard.data.preprocess.run import Pace
from shardyard.errors import UserError


def alpaca_rows(count, seed=3):
    rng = np.random.default_rng(seed)
    return [
        {
            "instruction": f"question {n} " + "tea " * int(rng.integers(0, 12)),
            "input": "",
            "output": f"answer {n} " + "in the sea " * int(rng.integers(0, 12)),
        }
        for n in range(count)
    ]


def entry_of(folder, rows, **described):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sources.resolve_datasets({"file_name": str(path), **described}, ".")[0]


def run(folder, entry, tokenizer, *, workers=1, **options):
    job = Job(
        kind=options.pop("kind", "sft"), entries=[entry], prefix=folder / "out", pace=Pace(workers),
        memo=folder / "memo.json", **options,
    )  # fmt: skip
    return run_job(job, tokenizer)


def own_samples(entry, tokenizer, **options):
    """What the encoder of fine-tuning makes of the rows."""
    encoder = Encoder(tokenizer, **options)
    return [sample for row in sources.iter_rows(entry) for sample in encoder.encode(convert(row, entry))]


def as_lists(sample):
    return sample.input_ids.tolist(), sample.labels.tolist(), sample.doc_lens


def part(folder, name):
    return IndexedReader(folder / f"out_packed_{name}_document")


def test_without_packing_each_sample_is_read_back_as_it_was(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    entry = entry_of(tmp_path, alpaca_rows(30))
    run(tmp_path, entry, tokenizer, seq_length=120)
    expected = own_samples(entry, byte_tokenizer(CHATML), cutoff_len=120)
    samples = PackedSamples(tmp_path / "out")
    assert len(samples) == 30
    assert [as_lists(sample) for sample in samples] == [as_lists(sample) for sample in expected]
    assert max(len(sample.input_ids) for sample in expected) == 120  # some were cut


def test_labels_stand_at_their_own_token_on_disk(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    rows = [{"instruction": "Why?", "input": "", "output": "Because."}]
    run(tmp_path, entry_of(tmp_path, rows), tokenizer)
    ids, labels = (part(tmp_path, name).sequence(0).tolist() for name in ("input_ids", "labels"))
    reply = tokenizer("Because.<|im_end|>")["input_ids"]
    trained = [(place, label) for place, label in enumerate(labels) if label != -100]
    assert [label for _, label in trained][: len(reply)] == reply
    assert all(ids[place] == label for place, label in trained)
    assert part(tmp_path, "attention_mask").sequence(0).tolist() == [1] * len(ids)
    assert part(tmp_path, "input_ids").dtype == np.uint16  # a small vocabulary
    assert part(tmp_path, "labels").dtype == part(tmp_path, "attention_mask").dtype == np.int32


@pytest.mark.parametrize("workers", [1, 2])
def test_packs_hold_every_sample_once_and_fit(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(sinks, "PACK_WINDOW", 16)
    tokenizer = byte_tokenizer(CHATML)
    entry = entry_of(tmp_path, alpaca_rows(60))
    result = run(tmp_path, entry, tokenizer, workers=workers, seq_length=400, pack=True)
    samples = PackedSamples(tmp_path / "out_packed")
    assert len(samples) < 60
    pieces = []
    for sample in samples:
        assert len(sample.input_ids) == sum(sample.doc_lens) <= 400
        begin = 0
        for length in sample.doc_lens:
            pieces.append((sample.input_ids[begin : begin + length], sample.labels[begin : begin + length]))
            begin += length
    found = sorted((ids.tolist(), labels.tolist()) for ids, labels in pieces)
    expected = own_samples(entry, byte_tokenizer(CHATML), cutoff_len=400)
    assert found == sorted((sample.input_ids.tolist(), sample.labels.tolist()) for sample in expected)
    masks = [part(tmp_path, "attention_mask").sequence(number) for number in range(len(samples))]
    assert all(mask.tolist() == sorted(mask.tolist()) and mask[0] == 1 for mask in masks)
    counts = result.counts["packed"]
    assert counts["samples"] == 60 and counts["sequences"] == len(samples)
    assert counts["trained tokens"] == sum(int((sample.labels != -100).sum()) for sample in expected)
    assert counts["tokens"] == sum(len(sample.input_ids) for sample in expected)


def test_packs_are_the_same_for_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "PACK_WINDOW", 16)
    entry = entry_of(tmp_path, alpaca_rows(60))
    seen = []
    for workers in (1, 2, 3):
        tokenizer = byte_tokenizer(CHATML)
        result = run(tmp_path, entry, tokenizer, workers=workers, seq_length=300, pack=True, overwrite=True)
        seen.append([prefix.with_name(prefix.name + ".bin").read_bytes() for prefix in result.prefixes])
    assert seen[0] == seen[1] == seen[2]


def test_padding_goes_to_a_multiple_and_is_stripped_again(tmp_path):
    tokenizer = byte_tokenizer(CHATML, pad="<s>")
    entry = entry_of(tmp_path, alpaca_rows(9))
    run(tmp_path, entry, tokenizer, seq_length=256, pack=True, pad_to_multiple_of=64)
    ids, masks, labels = (part(tmp_path, name) for name in ("input_ids", "attention_mask", "labels"))
    assert set(ids.sequence_lengths % 64) == {0} and int(ids.sequence_lengths.max()) <= 256
    samples = PackedSamples(tmp_path / "out")
    padded = 0
    for number, sample in enumerate(samples):
        length = len(sample.input_ids)
        padded += len(ids.sequence(number)) - length
        assert set(ids.sequence(number)[length:]) <= {tokenizer.pad_token_id}
        assert set(masks.sequence(number)[length:]) <= {0} and masks.sequence(number)[length - 1] > 0
        assert set(labels.sequence(number)[length:]) <= {-100}
    assert padded > 0
    assert sum(len(sample.input_ids) for sample in samples) == sum(
        len(sample.input_ids) for sample in own_samples(entry, byte_tokenizer(CHATML), cutoff_len=256)
    )


def test_a_template_that_rewrites_turns_gives_one_sample_per_reply(tmp_path):
    rows = [{"conversations": [
        {"from": "human", "value": "One?"}, {"from": "gpt", "value": "<think>\na\n</think>\n\nYes."},
        {"from": "human", "value": "Two?"}, {"from": "gpt", "value": "No."},
    ]}]  # fmt: skip
    entry = entry_of(tmp_path, rows, formatting="sharegpt")
    result = run(tmp_path, entry, byte_tokenizer(QWEN3_LIKE), template=None)
    samples = PackedSamples(tmp_path / "out")
    assert [as_lists(sample) for sample in samples] == [
        as_lists(sample) for sample in own_samples(entry, byte_tokenizer(QWEN3_LIKE))
    ]
    assert len(samples) == 2
    assert result.counts["packed"]["rows split into one sample per reply"] == 1


def test_rows_that_cannot_be_used_are_counted(tmp_path):
    rows = [
        *alpaca_rows(2),
        {"instruction": "q", "input": "", "output": ""},
        {"instruction": "", "output": "a"},
    ]
    result = run(tmp_path, entry_of(tmp_path, rows), byte_tokenizer(CHATML))
    counts = result.counts["packed"]
    assert counts["rows read"] == 4 and counts["samples"] == 2
    assert {why: drop["rows"] for why, drop in counts["dropped"].items()} == {
        "empty reply": 1,
        "empty prompt": 1,
    }
    assert counts["dropped"]["empty reply"]["first"].endswith("rows.jsonl:3")


def test_a_column_that_no_row_has_is_an_error(tmp_path):
    entry = entry_of(tmp_path, [{"question": "q", "answer": "a"}])
    with pytest.raises(UserError, match="columns found: answer, question"):
        run(tmp_path, entry, byte_tokenizer(CHATML))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def pair_rows(count):
    return [
        {"instruction": f"q{n}", "input": "", "chosen": "good " * (n + 1), "rejected": f"bad {n}"}
        for n in range(count)
    ]


def test_pairs_share_their_number_in_four_data_sets(tmp_path):
    columns = {"chosen": "chosen", "rejected": "rejected"}
    entry = entry_of(tmp_path, [*pair_rows(5), {"instruction": "q"}], ranking=True, columns=columns)
    result = run(tmp_path, entry, byte_tokenizer(CHATML), kind="pairs")
    encoder = Encoder(byte_tokenizer(CHATML), mask_history=True)
    for number, row in enumerate(sources.iter_rows(entry)):
        if number == 5:
            continue
        pair = convert_pair(row, entry)
        for half, reply in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            sample = encoder.encode(pair.conversation(reply))[-1]
            ids = part(tmp_path, f"{half}_input_ids").sequence(number)
            labels = part(tmp_path, f"{half}_labels").sequence(number)
            assert ids.tolist() == sample.input_ids.tolist()
            assert labels.tolist() == [-100, *sample.labels[:-1].tolist()]
    assert [prefix.name for prefix in result.prefixes] == [
        f"out_packed_{name}_document"
        for name in ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    ]
    assert result.counts["pairs"]["pairs"] == 5
    assert sum(drop["rows"] for drop in result.counts["pairs"]["dropped"].values()) == 1


def test_conversations_as_pretraining_text_end_once(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    entry = entry_of(tmp_path, alpaca_rows(4))
    run(tmp_path, entry, tokenizer, kind="document", append_eod=True)
    reader = IndexedReader(tmp_path / "out_text_document")
    expected = [
        [*sample.input_ids.tolist(), tokenizer.eos_token_id]
        for sample in own_samples(entry, byte_tokenizer(CHATML), cutoff_len=10**6)
    ]
    assert [reader.document(number).tolist() for number in range(reader.num_documents)] == expected


def write_parts(folder, **parts):
    for name, documents in parts.items():
        with IndexedWriter(folder / f"foreign_packed_{name}_document", np.int32) as writer:
            for document in documents:
                writer.add_document(np.array(document, np.int32))
            writer.finish()
    return folder / "foreign"


def test_a_mask_of_ones_is_one_document(tmp_path):
    prefix = write_parts(
        tmp_path, input_ids=[[5, 6, 7, 8]], attention_mask=[[1, 1, 1, 1]], labels=[[-100, 6, -100, 8]]
    )
    assert as_lists(PackedSamples(prefix)[0]) == ([5, 6, 7, 8], [6, -100, 8, -100], (4,))


def test_the_last_token_of_a_document_has_no_target_whatever_the_labels_say(tmp_path):
    prefix = write_parts(
        tmp_path, input_ids=[[5, 6, 7, 8, 0]], attention_mask=[[1, 1, 2, 2, 0]], labels=[[5, 6, 7, 8, 0]]
    )
    samples = pickle.loads(pickle.dumps(PackedSamples(prefix)))
    assert as_lists(samples[0]) == ([5, 6, 7, 8], [6, -100, 8, -100], (2, 2))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"labels": [[1, 2, 3], [4]]}, "labels_document has 2 sequences, .*input_ids_document has 1"),
        ({"labels": [[1, 2]]}, "labels_document: sequence 0 has 2 tokens, .* 3"),
        ({"attention_mask": [[1, 1, 1, 1]]}, "attention_mask_document: sequence 0 has 4 tokens"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_at_open(tmp_path, changed, told):
    parts = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]], "labels": [[1, 2, 3]]}
    with pytest.raises(UserError, match=told):
        PackedSamples(write_parts(tmp_path, **(parts | changed)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"labels": [[5, 6, -1]]}, r"labels_document: sequence 0 holds -1, .*not trained are -100\)"),
        ({"input_ids": [[5, -6, 7]]}, "input_ids_document: sequence 0 holds -6, which is no token id"),
    ],
)
def test_a_negative_id_is_refused_where_it_is_read(tmp_path, changed, told):
    """A label of -1 would be counted as trained, and no word would be its target."""
    parts = {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]], "labels": [[-100, 6, 7]]}
    with pytest.raises(UserError, match=told):
        PackedSamples(write_parts(tmp_path, **(parts | changed)))[0]


def test_a_missing_part_is_named(tmp_path):
    with pytest.raises(UserError, match=r"foreign_packed_attention_mask_document\.idx is missing"):
        PackedSamples(write_parts(tmp_path, input_ids=[[1]]))
