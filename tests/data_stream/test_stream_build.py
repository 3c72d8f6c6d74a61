"""A stream as a run builds it, with a real tokenizer: samples as without streaming, faults before step 1."""

import json
import logging

import numpy as np
import pytest
from data_stream.streams import make_config, open_numbers, write_rows
from support.tokenizers import CHATML, byte_tokenizer

from shardyard.config.data_rules import probabilities
from shardyard.data.sources import resolve_datasets
from shardyard.data.stream import build_stream
from shardyard.errors import UserError


def build(folder, config, tokenizer, *, leads=True, run="run", **options):
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    return build_stream(
        config, entries, tokenizer, key="key", run_id=run, folder=folder / "stream", is_local_leader=leads,
        global_batch=3, **options,
    )  # fmt: skip


def epoch_of_samples(stream, epoch=0):
    """The samples of each unit of an epoch, in training order."""
    cursor = 0
    while (batch := stream.sampler.global_batch_at(cursor)).epoch <= epoch:
        if batch.epoch == epoch:
            for number in range(len(batch.units)):
                yield [stream.store[index] for index in batch.units[number]]
        cursor = batch.end


def write_chats(folder, count):
    rows = [{"instruction": f"say {n}", "output": f"{n} " * (1 + n % 5)} for n in range(count)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_become_the_chat_templates_tokens(tmp_path, packing):
    rows = write_chats(tmp_path, 25)
    tokenizer = byte_tokenizer(CHATML)
    config = make_config(tmp_path, ["chats.jsonl"], packing=packing, cutoff_len=128, buffer_size=8)
    stream = build(tmp_path, config, tokenizer)
    units = list(epoch_of_samples(stream))
    expected = []
    for row in rows:
        turns = [
            {"role": "user", "content": row["instruction"]},
            {"role": "assistant", "content": row["output"]},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        expected.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    # Training needs nothing behind the reply's terminator, so a sample may lack the template's last newline.
    found = sorted(tokenizer.decode(sample.input_ids).rstrip() for unit in units for sample in unit)
    assert found == sorted(tokenizer.decode(ids).rstrip() for ids in expected)
    totals = [sum(len(sample.input_ids) for sample in unit) for unit in units]
    assert max(totals) <= 128
    assert (len(units) < 25 and max(map(len, units)) > 1) if packing else [*map(len, units)] == [1] * 25
    assert stream.preview_sample is not None and (stream.preview_sample.labels >= 0).any()
    assert stream.first_report.rows == 8
    stream.close()


def test_documents_become_a_token_stream(tmp_path):
    texts = [f"document {n} " * (1 + n % 3) for n in range(20)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    tokenizer = byte_tokenizer()
    config = make_config(
        tmp_path, ["texts.txt"], data_manager_type="mg", append_eod=True, cutoff_len=16, buffer_size=7,
        training={"stage": "pt"},
    )  # fmt: skip
    stream = build(tmp_path, config, tokenizer)
    samples = [sample for unit in epoch_of_samples(stream) for sample in unit]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    # Of three windows each one's first token is no target.
    assert sum(int((sample.labels >= 0).sum()) for sample in samples) == tokens - 3
    assert sum(int((sample.labels == tokenizer.eos_token_id).sum()) for sample in samples) == 20
    stream.close()


def test_all_ranks_of_a_node_share_windows(tmp_path):
    write_chats(tmp_path, 9)
    tokenizer = byte_tokenizer(CHATML)
    config = make_config(tmp_path, ["chats.jsonl"], cutoff_len=128)
    leader = build(tmp_path, config, tokenizer)
    follower = build(tmp_path, config, tokenizer, leads=False)
    assert follower.folder == leader.folder and follower.ahead is None
    assert follower.first_report == leader.first_report
    assert np.array_equal(follower.preview_sample.input_ids, leader.preview_sample.input_ids)
    follower.close()
    assert leader.folder.is_dir()
    leader.close()
    assert not leader.folder.exists()


def test_faults_come_before_the_first_step_and_leave_nothing(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "output": "b"}\n', encoding="utf-8")
    config = make_config(tmp_path, ["bad.jsonl"])
    for leads in (True, False):
        with pytest.raises(UserError, match=r"bad\.jsonl.*needs the column 'prompt'"):
            build(tmp_path, config, byte_tokenizer(CHATML), leads=leads)
    name = write_rows(tmp_path / "dropped.jsonl", range(5), lambda number: "drop")
    with pytest.raises(UserError, match=r"none of the 5 rows became a sample(?s:.*)asked to be dropped"):
        open_numbers(tmp_path, [name])
    (tmp_path / "blank.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="no rows"):
        open_numbers(tmp_path, ["blank.jsonl"])
    (tmp_path / "blank.txt").write_text("\n\n", encoding="utf-8")
    config = make_config(tmp_path, ["blank.txt"], data_manager_type="mg", training={"stage": "pt"})
    with pytest.raises(UserError, match="the input has no documents"):
        build(tmp_path, config, byte_tokenizer())
    with pytest.raises(UserError, match="vocabulary has 3"):
        write_chats(tmp_path, 9)
        config = make_config(tmp_path, ["chats.jsonl"], cutoff_len=128)
        build(tmp_path, config, byte_tokenizer(CHATML), vocab_size=3)
    assert not list((tmp_path / "stream").glob("*"))


def test_a_run_that_resumes_makes_the_window_of_its_position(tmp_path):
    write_chats(tmp_path, 9)
    config = make_config(tmp_path, ["chats.jsonl"], cutoff_len=128, buffer_size=4)
    stream = build(tmp_path, config, byte_tokenizer(CHATML), start_cursor=2**44 + 2 * 2**24)
    assert [file.name for file in stream.folder.glob("*.window")] == ["e1-w2.window"]
    assert stream.first_report.rows == 1
    stream.close()
    with pytest.raises(UserError, match=r"no rows at the position to go on from \(window 3 of epoch 0\)"):
        build(tmp_path, config, byte_tokenizer(CHATML), start_cursor=3 * 2**24)


def test_a_first_window_without_samples_is_a_warning(tmp_path, caplog):
    name = write_rows(tmp_path / "a.jsonl", range(1, 9), lambda number: "drop" if number < 5 else "r")
    stream = open_numbers(tmp_path, [name], buffer_size=4)
    assert "nothing of the first window would be trained" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING and "asked to be dropped" in caplog.text
    assert stream.preview_sample is None and stream.first_report.rows == 4
    stream.close()


def test_shares_must_fit_the_entries(tmp_path):
    names = [write_rows(tmp_path / f"{letter}.jsonl", range(9)) for letter in "abc"]
    with pytest.raises(UserError, match="2 shares for 3 data sets"):
        open_numbers(tmp_path, names, mix_strategy="interleave_under", interleave_probs="0.5,0.5")


def test_shares_of_the_settings_are_followed(tmp_path):
    names = [
        write_rows(tmp_path / "a.jsonl", range(1, 70)),
        write_rows(tmp_path / "b.jsonl", range(101, 140)),
    ]
    options = {"mix_strategy": "interleave_over", "interleave_probs": "7,3", "buffer_size": 10}
    assert probabilities("7,3") == (0.7, 0.3)
    stream = open_numbers(tmp_path, names, global_batch=10, **options)
    for window in range(6):
        batch = stream.sampler.global_batch_at(window * 2**24)
        first = [int(stream.store[index].input_ids[0]) for index in batch.indices.tolist()]
        assert sum(number < 100 for number in first) == 7
    stream.close()


def test_what_a_position_depends_on_is_told(tmp_path):
    names = [write_rows(tmp_path / f"{letter}.jsonl", range(1, 9)) for letter in "ab"]
    told = set()
    for run, options in enumerate(
        [
            {},
            {"buffer_size": 5},
            {"packing": True},
            {"mix_strategy": "interleave_under"},
            {"mix_strategy": "interleave_under", "interleave_probs": "1,2"},
            {"training": {"seed": 1}},
            {"training": {"disable_shuffling": True}},
            {"packing": True, "cutoff_len": 9},
        ]
    ):
        stream = open_numbers(tmp_path, names, run=str(run), **options)
        told.add(stream.order)
        stream.close()
    assert len(told) == 8
