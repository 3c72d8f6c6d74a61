"""Settings that meet: what one of them must not do to the other's samples, shares or positions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.run_data import CHAT, make_config, make_tokenizer, write_rows

from shardyard.data.batches import BatchLoader
from shardyard.data.build import build_run_data
from shardyard.data.order import EpochOrder, PackedOrder
from shardyard.data.sampler import ElasticSampler
from shardyard.errors import UserError


def build(config):
    return build_run_data(config, make_tokenizer(chat_template=CHAT))


def write_chats(file, count):
    rows = [{"instruction": f"{file.stem} {n}", "output": "a"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def chats(tmp_path, dataset, training=None, **data):
    values = {"data_manager_type": "lf", "cutoff_len": 64, "append_eod": False, "dataset": dataset, **data}
    return make_config(tmp_path, "unused", {"stage": "sft", **(training or {})}, **values)


def test_switches_of_packing_do_not_join_documents_that_a_mask_keeps_apart(tmp_path):
    write_rows(tmp_path / "t.jsonl", ["ab", "cd", "ef"])
    config = make_config(
        tmp_path, tmp_path / "t.jsonl", reset_attention_mask=True, packing=True, cross_document_attention=True
    )
    data = build(config)
    loader = BatchLoader(
        data.samples, data.sampler, dp_rank=0, dp_size=1, per_device=1, merge_packs=data.merge_packs
    )
    # nine tokens, three of each document: a window of eight inputs
    assert next(iter(loader)).micro_batches[0].doc_lens == (3, 3, 2)


@pytest.mark.parametrize("strategy", ["interleave_under", "interleave_over"])
def test_a_set_that_validation_takes_whole_cannot_have_a_share(tmp_path, strategy):
    files = (write_chats(tmp_path / "one.jsonl", 1), write_chats(tmp_path / "many.jsonl", 8))
    refused = 0
    for seed in range(6):
        config = chats(tmp_path, files, {"seed": seed}, val_size=7, mix_strategy=strategy)
        try:
            sampler = build(config).sampler
        except UserError as error:
            assert "data.val_size: 7 leaves nothing of " in str(error)
            assert "data.mix_strategy" in str(error)
            refused += 1
        else:
            assert isinstance(sampler, ElasticSampler)
            assert sampler.order.size(0) == len(sampler.order.units(0, 0, 2)) == 2  # one is left of each
    assert 0 < refused <= 6


def stream_identity(tmp_path, dataset, **data):
    training = {"max_steps": 1}
    stream = {"streaming": True, "buffer_size": 4, "append_eod": False}
    built = build(chats(tmp_path, dataset, training, **stream, **data))
    built.close()
    return built.identity


def test_a_position_in_a_stream_counts_in_the_order_of_its_sets(tmp_path):
    first, second = write_chats(tmp_path / "x.jsonl", 3), write_chats(tmp_path / "y.jsonl", 3)
    told = stream_identity(tmp_path, (first, second))
    assert told == stream_identity(tmp_path, (first, second))
    assert told != stream_identity(tmp_path, (second, first))


def test_sets_of_one_name_in_a_stream_are_told_apart(tmp_path):
    file = write_chats(tmp_path / "x.jsonl", 3)

    def twice(response):
        entries = ({"file_name": file, "columns": {"response": response}}, {"file_name": file})
        return stream_identity(tmp_path, entries)

    assert twice("output") != twice("instruction")


def test_a_position_in_megatrons_index_counts_in_its_shares_and_mask(tmp_path):
    for name in ("x", "y"):
        write_rows(tmp_path / f"{name}.jsonl", [f"{name} {n} words of text" for n in range(6)])

    def identity(shares, **data):
        named = {"file_name": [part for n, s in shares for part in (s, str(tmp_path / f"{n}.jsonl"))]}
        training = {"disable_shuffling": False, "max_steps": 1}
        config = make_config(tmp_path, "", training, index_compat="megatron", dataset=named, **data)
        return build(config).identity

    told = identity([("x", "0.3"), ("y", "0.7")])
    assert told == identity([("x", "3"), ("y", "7")])
    assert told != identity([("x", "0.6"), ("y", "0.4")])
    assert told != identity([("x", "0.3"), ("y", "0.7")], reset_attention_mask=True)


def packed_sizes(seed):
    lengths = np.random.default_rng(seed).integers(1, 64, size=30)
    order = PackedOrder(EpochOrder(30, seed=seed, shuffle=True), lengths, capacity=64, window=7)
    return order, [order.size(epoch) for epoch in range(8)]


@pytest.mark.parametrize("by_epochs", [False, True])
def test_several_epochs_of_too_few_packs_for_a_batch_are_passed_over(by_epochs):
    rows = 0
    for seed in range(40):
        order, sizes = packed_sizes(seed)
        whole = [epoch for epoch, size in enumerate(sizes) if size >= sizes[0]]
        rows += any(small + 1 not in whole for small in range(7) if small not in whole)
        sampler = ElasticSampler(
            order, global_batch=sizes[0], drop_last=True, num_train_epochs=8.0,
            max_steps=-1 if by_epochs else len(whole),
        )  # fmt: skip
        cursor, epochs = 0, []
        for _ in range(sampler.total_steps):
            batch = sampler.global_batch_at(cursor)
            epochs.append(batch.epoch)
            cursor = batch.end
        assert epochs == whole
        assert sampler.steps_from(cursor, sampler.total_steps) == 0
    assert rows > 10, "two small epochs in a row must occur"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("good", [0, 2])
def test_texts_that_are_not_unicode_are_counted_whether_streamed_or_not(tmp_path, streaming, good):
    file = tmp_path / "t.jsonl"
    rows = ['{"text": "half \\ud800"}', '{"text": " "}', '{"text": "x"}', *['{"text": "abc"}'] * good]
    file.write_text("\n".join(rows), encoding="utf-8")
    config = make_config(tmp_path, file, {"max_steps": 1}, streaming=streaming, append_eod=False)
    if not good:  # one token has no next one to predict
        with pytest.raises(UserError, match="half of a surrogate pair") as caught:
            build(config)
        assert "rows read" in str(caught.value) or "documents read" in str(caught.value)
        return
    data = build(config)
    data.close()
    dropped = {reason: (one.count, one.first) for reason, one in data.report.dropped.items()}
    assert dropped == {
        "text that is not valid Unicode (half of a surrogate pair)": (1, f"{file}:1"),
        "empty document": (1, f"{file}:2"),
    }
    assert data.report.rows == 5
