"""What a run trains and validates on: data sets joined by share, packs, held-out samples, token files."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from support.run_data import CHAT, make_config, make_tokenizer, write_rows

from shardyard.cli import main
from shardyard.config import Config
from shardyard.data.build import build_run_data
from shardyard.data.indexed import IndexedWriter
from shardyard.errors import UserError


def write_chats(folder, name, count, reply="a"):
    file = folder / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": f"{name} {n}", "output": reply * (1 + n % 5)} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def chats(tmp_path, dataset, training=None, **data):
    values = {"data_manager_type": "lf", "cutoff_len": 64, "append_eod": False, **data}
    values.setdefault("val_size", 0.0)
    stage = {"stage": "sft", "disable_shuffling": False, "num_train_epochs": 1.0, "seed": 3}
    config = make_config(tmp_path, "unused", {**stage, **(training or {})}, **values, dataset=dataset)
    return Config.model_validate(config.model_dump())


def names_of(data, indices):
    """The question of each sample, read from its tokens."""
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(data.samples[int(index)].input_ids) for index in indices]
    return [text.removeprefix("<user>").split("<eos>")[0] for text in texts]


def epoch_names(data, epoch=0):
    order = data.sampler.order
    return names_of(data, order.units(epoch, 0, order.size(epoch)).indices)


def build(config):
    return build_run_data(config, make_tokenizer(chat_template=CHAT))


def test_concat_takes_every_sample_of_every_data_set_once(tmp_path):
    files = [write_chats(tmp_path, "x", 7), write_chats(tmp_path, "y", 4)]
    data = build(chats(tmp_path, (files[0], {"file_name": files[1]})))
    wanted = [f"x {n}" for n in range(7)] + [f"y {n}" for n in range(4)]
    assert sorted(epoch_names(data)) == sorted(wanted)
    assert [(part.report.rows, part.report.samples) for part in data.parts] == [(7, 7), (4, 4)]
    assert data.report.samples == 11
    assert epoch_names(data, 0) != epoch_names(data, 1)


@pytest.mark.parametrize(
    ("strategy", "probs", "wanted"),
    [
        ("interleave_under", None, {"x": 4, "y": 4}),
        ("interleave_over", None, {"x": 8, "y": 8}),
        ("interleave_under", "0.75,0.25", {"x": 8, "y": 3}),  # x is the first to run out: 8 / 0.75 in all
        ("interleave_over", "0.75,0.25", {"x": 12, "y": 4}),  # y is the last: 4 / 0.25 in all
        ("interleave_over", "1,3", {"x": 8, "y": 24}),
    ],
)
def test_interleaving_ends_with_the_first_or_the_last_data_set(tmp_path, strategy, probs, wanted):
    files = (write_chats(tmp_path, "x", 8), write_chats(tmp_path, "y", 4))
    data = build(chats(tmp_path, files, mix_strategy=strategy, interleave_probs=probs))
    names = epoch_names(data)
    assert Counter(name[0] for name in names) == wanted
    per_data_set = {letter: Counter(name for name in names if name[0] == letter) for letter in "xy"}
    for counts in per_data_set.values():
        assert max(counts.values()) - min(counts.values()) <= 1, "no sample twice before each came once"


def test_what_one_epoch_leaves_out_comes_in_the_next(tmp_path):
    files = (write_chats(tmp_path, "x", 9), write_chats(tmp_path, "y", 3))
    data = build(chats(tmp_path, files, mix_strategy="interleave_under"))
    seen = [name for epoch in range(3) for name in epoch_names(data, epoch) if name[0] == "x"]
    assert sorted(seen) == [f"x {n}" for n in range(9)]


def test_shares_for_another_number_of_data_sets_are_refused(tmp_path):
    for name in ("a", "b", "c"):
        write_chats(tmp_path / "many", name, 2)
    folder = str(tmp_path / "many")
    with pytest.raises(UserError, match=r"2 shares for the 1 data sets"):
        build(chats(tmp_path, (folder,), mix_strategy="interleave_over", interleave_probs="1,2"))


@pytest.mark.parametrize("size", [3, 0.3, 1])
def test_held_out_samples_are_validated_on_and_never_trained(tmp_path, size):
    data = build(chats(tmp_path, write_chats(tmp_path, "x", 10), val_size=size))
    (held_out,) = data.evals
    held = names_of_samples(held_out.samples)
    assert held_out.name == "validation" and len(held) == (3 if size == 0.3 else size)
    assert sorted([*held, *epoch_names(data)]) == sorted(f"x {n}" for n in range(10))
    again = build(chats(tmp_path, write_chats(tmp_path, "x", 10), val_size=size))
    assert names_of_samples(again.evals[0].samples) == held


def names_of_samples(samples):
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(samples[index].input_ids) for index in range(len(samples))]
    return [text.removeprefix("<user>").split("<eos>")[0] for text in texts]


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_a_row_are_held_out_together(tmp_path, seed):
    dataset = {"file_name": write_chats(tmp_path, "x", 5), "num_samples": 13}
    data = build(chats(tmp_path, dataset, {"seed": seed}, val_size=4))
    held, trained = Counter(names_of_samples(data.evals[0].samples)), Counter(epoch_names(data))
    assert sum((held + trained).values()) == 13 and not set(held) & set(trained)
    assert 4 <= sum(held.values()) <= 6, "two or three copies of each row"


REWRITES = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('|')[-1] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves out what stands before | in all replies but the last, so a conversation is a sample per reply."""


@pytest.mark.parametrize("seed", range(4))
def test_samples_of_one_row_are_held_out_together(tmp_path, seed):
    file = tmp_path / "talks.jsonl"
    talks = [
        [{"from": who, "value": f"{who} {n}|{turn}"} for turn in range(3) for who in ("human", "gpt")]
        for n in range(6)
    ]
    file.write_text("".join(json.dumps({"conversations": talk}) + "\n" for talk in talks), encoding="utf-8")
    dataset = {"file_name": str(file), "formatting": "sharegpt"}
    config = chats(tmp_path, dataset, {"seed": seed}, val_size=4, cutoff_len=400)
    data = build_run_data(config, make_tokenizer(chat_template=REWRITES))
    assert data.report.samples == 18
    held, trained = names_of_samples(data.evals[0].samples), epoch_names(data)
    rows_of = [{name.split("|")[0] for name in names} for names in (held, trained)]
    assert (len(held), len(trained)) == (6, 12) and not rows_of[0] & rows_of[1]


@pytest.mark.parametrize("size", [3, 4])
def test_a_validation_set_that_leaves_nothing_is_refused(tmp_path, size):
    with pytest.raises(UserError, match=r"data\.val_size: .* of 3 samples leaves nothing to train on"):
        build(chats(tmp_path, write_chats(tmp_path, "x", 3), val_size=size))


def test_named_validation_sets_stay_whole_together_or_apart(tmp_path):
    train, first, second = (
        write_chats(tmp_path, name, count) for name, count in (("t", 5), ("v", 3), ("w", 2))
    )
    together = build(chats(tmp_path, train, eval_dataset=(first, second)))
    assert [(one.name, len(one.samples)) for one in together.evals] == [("validation", 5)]
    apart = build(chats(tmp_path, train, eval_dataset=(first, second), eval_on_each_dataset=True))
    assert [names_of_samples(one.samples) for one in apart.evals] == [["v 0", "v 1", "v 2"], ["w 0", "w 1"]]
    assert len(epoch_names(apart)) == 5


def test_a_named_folder_holds_each_data_set_and_those_of_validation_beside_it(tmp_path):
    files = [write_chats(tmp_path, name, count) for name, count in (("x", 5), ("y", 4), ("v", 3))]
    folder = tmp_path / "kept"
    settings = {"tokenized_path": str(folder), "eval_dataset": files[2]}
    for _ in range(2):
        data = build(chats(tmp_path, tuple(files[:2]), **settings))
        assert [part.path for part in data.parts] == [folder / "000", folder / "001"]
        assert len(data.evals[0].samples) == 3
    assert [part.path for part in data.eval_parts] == [tmp_path / "kept-eval"]


def test_packs_fill_sequences_and_say_how_well(tmp_path, caplog):
    caplog.set_level("INFO", "shardyard.data")
    data = build(chats(tmp_path, write_chats(tmp_path, "x", 20), packing=True, cutoff_len=100))
    order = data.sampler.order
    units = order.units(0, 0, order.size(0))
    lengths = [[len(data.samples[i].input_ids) for i in units[n]] for n in range(len(units))]
    assert all(sum(pack) <= 100 for pack in lengths) and len(lengths) < 20
    assert sorted(names_of(data, units.indices)) == sorted(f"x {n}" for n in range(20))
    share = sum(map(sum, lengths)) / (100 * len(lengths))
    assert (
        f"20 samples make {len(lengths)} packs of at most 100 tokens, {100 * share:.1f} % full" in caplog.text
    )
    assert data.identity != build(chats(tmp_path, str(tmp_path / "x.jsonl"), cutoff_len=100)).identity


def write_tokens(tmp_path, name, documents):
    prefix = tmp_path / "data" / name
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return prefix


def pretraining(tmp_path, dataset, training=None, **data):
    return make_config(
        tmp_path, "unused", {"disable_shuffling": False, **(training or {})}, dataset=dataset, **data
    )


DOCUMENTS = [[10 * n + k for k in range(3 + n)] for n in range(6)]


def targets(data):
    order = data.sampler.order
    indices = order.units(0, 0, order.size(0)).indices
    return [label for i in sorted(indices.tolist()) for label in data.samples[i].labels.tolist()]


@pytest.mark.parametrize("spelling", ["name", "name.bin", "name.idx", "mapping", "list"])
def test_token_files_are_found_by_prefix(tmp_path, spelling):
    prefix = write_tokens(tmp_path, "tokens", DOCUMENTS)
    dataset = {
        "name": "tokens", "name.bin": "tokens.bin", "name.idx": str(prefix) + ".idx",
        "mapping": {"file_name": "tokens"}, "list": ("tokens",),
    }[spelling]  # fmt: skip
    data = build(pretraining(tmp_path, dataset, {"disable_shuffling": True}))
    stream = [token for document in DOCUMENTS for token in document]
    assert targets(data) == stream[1:]
    assert data.report.largest_id == max(stream)
    assert data.report.rows == 6 and data.report.trained_tokens == len(stream) - 1


def test_documents_are_shuffled_by_the_seed_and_no_token_is_lost(tmp_path):
    write_tokens(tmp_path, "tokens", DOCUMENTS)
    streams = {seed: targets(build(pretraining(tmp_path, "tokens", {"seed": seed}))) for seed in (1, 2)}
    everything = Counter(token for document in DOCUMENTS for token in document)
    for labels in streams.values():
        missing = everything - Counter(labels)
        assert sum(missing.values()) == 1 and next(iter(missing)) in [doc[0] for doc in DOCUMENTS]
    assert streams[1] != streams[2]


def test_trained_tokens_of_separate_documents_are_counted_exactly(tmp_path):
    write_tokens(tmp_path, "tokens", DOCUMENTS)
    data = build(pretraining(tmp_path, "tokens", reset_attention_mask=True))
    labelled = [label for label in targets(data) if label != -100]
    assert data.report.trained_tokens == len(labelled)
    assert (data.report.samples, data.report.tokens) == (len(data.samples), len(targets(data)))


def test_shares_before_prefixes_make_an_epoch_of_that_mixture(tmp_path):
    write_tokens(tmp_path, "a", [[n] * 9 for n in range(1, 11)])
    write_tokens(tmp_path, "b", [[100 + n] * 9 for n in range(10)])
    data = build(pretraining(tmp_path, {"file_name": "0.75,a,0.25,b"}, cutoff_len=9))
    order = data.sampler.order
    firsts = [int(data.samples[int(i)].input_ids[0]) for i in order.units(0, 0, order.size(0)).indices]
    assert len(firsts) == 20 and sum(first < 100 for first in firsts) == 15


@pytest.mark.parametrize("items", [["0.5", "a", "b"], ["a", "0.5"], ["0.5", "a", "-1", "b"], ["1", "2"]])
def test_shares_that_do_not_take_turns_with_paths_are_refused(tmp_path, items):
    write_tokens(tmp_path, "a", DOCUMENTS)
    with pytest.raises(UserError, match=r"data\.dataset"):
        build(pretraining(tmp_path, tuple(items)))


def test_a_split_holds_documents_out_for_validation(tmp_path):
    write_tokens(tmp_path, "tokens", [[n] * 4 for n in range(1, 11)])
    data = build(pretraining(tmp_path, "tokens", split="80,20,0", cutoff_len=4))
    trained = {token for token in targets(data)}
    (held_out,) = data.evals
    validated = {int(t) for i in range(len(held_out.samples)) for t in held_out.samples[i].input_ids}
    assert trained == set(range(1, 9)) and validated == {9, 10}


def test_max_samples_of_token_files_is_refused(tmp_path):
    write_tokens(tmp_path, "tokens", DOCUMENTS)
    with pytest.raises(UserError, match=r"data\.max_samples"):
        build(pretraining(tmp_path, "tokens", max_samples=3))


def test_a_file_without_its_partner_and_the_name_that_was_meant(tmp_path):
    prefix = write_tokens(tmp_path, "corpus_text_document", DOCUMENTS)
    with pytest.raises(UserError, match=r"did you mean .*corpus_text_document\?"):
        build(pretraining(tmp_path, "corpus"))
    prefix.with_name("corpus_text_document.idx").unlink()
    with pytest.raises(UserError, match=r"corpus_text_document\.bin has no corpus_text_document\.idx"):
        build(pretraining(tmp_path, "corpus_text_document"))


def test_megatrons_index_gives_as_many_samples_as_the_run_trains(tmp_path):
    write_tokens(tmp_path, "tokens", DOCUMENTS)
    training = {"max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    config = pretraining(tmp_path, "tokens", training, index_compat="megatron", cutoff_len=5)
    data = build_run_data(config, make_tokenizer(), dp_size=2)
    assert len(data.samples) == 7 * 2 * 3 * 2
    assert (data.sampler.total_steps, data.sampler.updates_per_epoch) == (7, 7)
    in_order = data.sampler.order.units(0, 0, 5).indices.tolist()
    assert in_order == [0, 1, 2, 3, 4], "the shuffling is in the index"
    by_epochs = build(
        pretraining(tmp_path, "tokens", {"num_train_epochs": 3.0}, index_compat="megatron", cutoff_len=5)
    )
    tokens = sum(map(len, DOCUMENTS))
    assert len(by_epochs.samples) == 3 * ((tokens - 1) // 5)


def test_raw_files_with_a_split_and_two_data_sets(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("one", "two"):
        write_rows(folder / f"{name}.jsonl", [f"{name} {n}" for n in range(10)])
    data = build(pretraining(tmp_path, ("one.jsonl", "two.jsonl"), split="90,10,0"))
    assert [part.report.rows for part in data.parts] == [10, 10]
    tokenizer = make_tokenizer()
    (held_out,) = data.evals
    text = "".join(tokenizer.decode(held_out.samples[i].input_ids) for i in range(len(held_out.samples)))
    assert "one 9" in text and "two 9" in text and "one 8" not in text


def preprocessed(tmp_path, tokenizer, name="corpus", append_eod=True):
    """Token files of `shardyard preprocess`, with their manifest."""
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    write_rows(folder / "corpus.jsonl", [f"text {n}" for n in range(6)])
    tokenizer.save_pretrained(tmp_path / name)
    words = ["--input", str(folder / "corpus.jsonl"), "--tokenizer-name-or-path", str(tmp_path / name)]
    words += ["--output-prefix", str(folder / name)] + ["--append-eod"] * append_eod
    assert main(["preprocess", *words]) == 0
    return f"{name}_text_document"


def test_token_files_of_another_tokenizer_are_refused_while_their_manifest_tells(tmp_path):
    prefix = preprocessed(tmp_path, make_tokenizer())
    assert build_run_data(pretraining(tmp_path, prefix), make_tokenizer()).report.rows == 6
    other = make_tokenizer(extra=["text"])
    with pytest.raises(UserError, match="was tokenised with another tokenizer"):
        build_run_data(pretraining(tmp_path, prefix), other)
    (tmp_path / "data" / "corpus_manifest.json").unlink()
    assert build_run_data(pretraining(tmp_path, prefix), other).report.rows == 6


@pytest.mark.parametrize("has_ends", [True, False])
def test_append_eod_of_files_without_end_tokens_is_told(tmp_path, caplog, has_ends):
    prefix = preprocessed(tmp_path, make_tokenizer(), append_eod=has_ends)
    build_run_data(pretraining(tmp_path, prefix, append_eod=True), make_tokenizer())
    assert ("6 of the first 6 documents of" in caplog.text) is not has_ends
