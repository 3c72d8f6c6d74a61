"""Preparing the data end to end: what is tokenised again, by whom, and what a failure leaves behind."""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.run_data import CHAT, make_config, make_tokenizer, write_pairs, write_rows

from shardyard.data import key as keys
from shardyard.data.build import build_run_data, cache_folder
from shardyard.data.leader import Prepared, PreparedSet, Role, prepare_once
from shardyard.data.parts import JoinedSamples
from shardyard.errors import UserError

TEXTS = ["the cat sat", "", "on the mat", "and slept for a very long time", "  ", "end"]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "corpus.jsonl", TEXTS)
    return folder / "corpus.jsonl"


def plain_stream(tokenizer, texts=TEXTS):
    return [
        token
        for text in texts
        if text.strip()
        for token in [*tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)), tokenizer.eos_token_id]
    ]


def built(caplog, config, tokenizer):
    """(data, whether it was tokenised now)."""
    caplog.clear()
    caplog.set_level(logging.INFO, "shardyard.data")
    data = build_run_data(config, tokenizer)
    return data, "from the cache" not in caplog.text


def test_windows_report_and_preview(tmp_path, corpus):
    tokenizer = make_tokenizer()
    data = build_run_data(make_config(tmp_path, corpus), tokenizer)
    stream = plain_stream(tokenizer)
    labels = [label for i in range(len(data.samples)) for label in data.samples[i].labels.tolist()]
    assert labels == stream[1:]
    assert [len(data.samples[i].input_ids) for i in range(len(data.samples))][:-1] == [8] * (
        len(data.samples) - 1
    )
    report = data.report
    assert (report.rows, report.samples, report.tokens) == (6, len(data.samples), len(stream) - 1)
    assert report.trained_tokens == len(stream) - 1
    assert report.largest_id == tokenizer.eos_token_id == 256
    drop = report.dropped["empty document"]
    assert (drop.count, drop.first.rpartition(":")[2]) == (2, "2")
    assert data.preview.text == "t[[he cat ]]"
    assert data.preview.input_ids == stream[:8]
    table = "\n".join(report.lines())
    assert "documents read" in table and "dropped: empty document" in table


def test_max_samples_takes_the_first_documents(tmp_path, corpus):
    tokenizer = make_tokenizer()
    data = build_run_data(make_config(tmp_path, corpus, max_samples=3), tokenizer)
    assert data.report.rows == 3
    assert data.report.tokens == len(plain_stream(tokenizer, TEXTS[:3])) - 1


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("manager", ["mg", "lf"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path, manager, workers):
    file = tmp_path / "data" / "many.jsonl"
    file.parent.mkdir()
    write_pairs(file, 200)
    stage = {"stage": "pt" if manager == "mg" else "sft"}
    folders = []
    for number, batch in ((1, 1000), (workers, 7)):
        config = make_config(
            tmp_path, file, stage, data_manager_type=manager, preprocessing_batch_size=batch, cutoff_len=64,
            preprocessing_num_workers=number, tokenized_path=str(tmp_path / f"{number}-{batch}"),
        )  # fmt: skip
        folders.append(build_run_data(config, make_tokenizer(chat_template=CHAT)).parts[0].path)
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) == (3 if manager == "mg" else 8)
    for name in names:
        if name != "manifest.json":
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


CHANGES = {
    "max_samples": {"max_samples": 2},
    "append_eod": {"append_eod": False},
    "split_special_tokens": {"model": {"split_special_tokens": True}},
    "stage": {"training": {"stage": "sft"}, "data_manager_type": "lf", "cutoff_len": 64},
    "columns": {"column": True},
}
CHAT_CHANGES = {
    "template": {"template": "empty"},
    "cutoff_len": {"cutoff_len": 24},
    "max_samples": {"max_samples": 2},
    "train_on_prompt": {"train_on_prompt": True},
    "mask_history": {"mask_history": True},
    "enable_thinking": {"enable_thinking": None},
    "default_system": {"default_system": "Be brief."},
    "no default_system": {"default_system": ""},
    "split_special_tokens": {"model": {"split_special_tokens": True}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_matters_tokenises_documents_again(tmp_path, corpus, caplog, change):
    write_pairs(corpus)
    tokenizer, values = make_tokenizer(chat_template=CHAT), dict(CHANGES[change])
    assert built(caplog, make_config(tmp_path, corpus), tokenizer)[1]
    assert not built(caplog, make_config(tmp_path, corpus), tokenizer)[1]
    if values.pop("column", False):
        values["dataset"] = {"file_name": str(corpus), "columns": {"text": "text"}}
    assert built(caplog, make_config(tmp_path, corpus, **values), tokenizer)[1]
    assert not built(caplog, make_config(tmp_path, corpus), tokenizer)[1]


@pytest.mark.parametrize("change", CHAT_CHANGES)
def test_a_setting_that_matters_tokenises_conversations_again(tmp_path, corpus, caplog, change):
    write_pairs(corpus)
    tokenizer = make_tokenizer(chat_template=CHAT)
    chat = {"training": {"stage": "sft"}, "data_manager_type": "lf", "cutoff_len": 64}
    assert built(caplog, make_config(tmp_path, corpus, **chat), tokenizer)[1]
    assert not built(caplog, make_config(tmp_path, corpus, **chat), tokenizer)[1]
    changed = {**chat, **CHAT_CHANGES[change]}
    assert built(caplog, make_config(tmp_path, corpus, **changed), tokenizer)[1]
    assert not built(caplog, make_config(tmp_path, corpus, **chat), tokenizer)[1]


def test_other_content_of_a_template_file_tokenises_again(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_pairs(corpus)
    for name in ("~/own.jinja", str(tmp_path / "own.jinja")):
        for role in ("<assistant>", "<ai>"):
            source = CHAT.replace(
                "<{{ m.role }}>", f"{{% if m.role == 'user' %}}<user>{{% else %}}{role}{{% endif %}}"
            )
            source = source.replace("<assistant>{% endif %}", role + "{% endif %}")
            (tmp_path / "own.jinja").write_text(source, encoding="utf-8")
            config = make_config(
                tmp_path, corpus, {"stage": "sft"}, data_manager_type="lf", append_eod=False, cutoff_len=64,
                template=name,
            )  # fmt: skip
            data = build_run_data(config, make_tokenizer())
            assert role in make_tokenizer().decode(data.samples[0].input_ids)


@pytest.mark.parametrize(
    "change", [{"cutoff_len": 5}, {"reset_attention_mask": True}, {"split": "60,40,0"}], ids=str
)
def test_windows_are_cut_anew_from_the_same_documents(tmp_path, corpus, caplog, change):
    before, _ = built(caplog, make_config(tmp_path, corpus), make_tokenizer())
    after, again = built(caplog, make_config(tmp_path, corpus, **change), make_tokenizer())
    assert not again
    assert before.identity != after.identity, "a cursor of the one would count in the other"


TOKENIZERS = {
    "another tokenizer of the same class": lambda: make_tokenizer(eos="<end>"),
    "an added token": lambda: make_tokenizer(extra=["cat"]),
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_another_tokenizer_tokenises_again(tmp_path, corpus, caplog, change):
    config = make_config(tmp_path, corpus)
    built(caplog, config, make_tokenizer())
    assert not built(caplog, config, make_tokenizer())[1]
    assert built(caplog, config, TOKENIZERS[change]())[1]
    assert "tokenising again: " in caplog.text and "tokenizer changed" in caplog.text


def test_other_content_of_the_same_size_tokenises_again(tmp_path, corpus, caplog):
    config = make_config(tmp_path, corpus)
    built(caplog, config, make_tokenizer())
    state = corpus.stat()
    corpus.write_text(corpus.read_text(encoding="utf-8").replace("cat", "dog"), encoding="utf-8")
    os.utime(corpus, ns=(state.st_atime_ns, state.st_mtime_ns))
    data, again = built(caplog, config, make_tokenizer())
    assert again
    assert "contents of its files changed" in caplog.text
    assert "dog" in make_tokenizer().decode(data.samples[0].input_ids)


def test_a_new_version_of_the_code_tokenises_again(tmp_path, corpus, caplog, monkeypatch):
    config = make_config(tmp_path, corpus)
    built(caplog, config, make_tokenizer())
    monkeypatch.setattr(keys, "CODE_VERSION", keys.CODE_VERSION + 1)
    assert built(caplog, config, make_tokenizer())[1]


def test_what_changes_no_token_is_read_from_the_cache(tmp_path, corpus, caplog):
    built(caplog, make_config(tmp_path, corpus), make_tokenizer())
    others = [
        {"training": {"output_dir": str(tmp_path / "elsewhere")}},
        {"training": {"logging_steps": 7}},
        {"training": {"seed": 1, "lr": 0.5}},
        {"training": {"per_device_train_batch_size": 1}},
        {"preprocessing_num_workers": 2},
        {"preprocessing_batch_size": 1},
        {"data_shared_file_system": True},
        {"model": {"model_name_or_path": "another/model"}},
    ]
    for other in others:
        values = {"training": None, "model": None, **other}
        assert not built(caplog, make_config(tmp_path, corpus, **values), make_tokenizer())[1], other
        assert len([record for record in caplog.records if record.levelno >= logging.INFO]) == 1


def test_a_copy_of_the_files_elsewhere_hits_the_cache(tmp_path, corpus, caplog):
    built(caplog, make_config(tmp_path, corpus), make_tokenizer())
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    assert not built(caplog, make_config(tmp_path, copy), make_tokenizer())[1]


def test_a_rebuild_says_what_changed(tmp_path, corpus, caplog):
    built(caplog, make_config(tmp_path, corpus), make_tokenizer())
    built(caplog, make_config(tmp_path, corpus, append_eod=False), make_tokenizer())
    assert "tokenising again: data.append_eod was True, is False" in caplog.text


def test_a_rebuild_does_not_name_what_stayed(tmp_path, corpus, caplog):
    entry = {"file_name": str(corpus), "columns": {"text": "text", "system": None}}
    for limit in (3, 4):
        config = make_config(tmp_path, corpus, dataset=entry, max_samples=limit)
        built(caplog, config, make_tokenizer())
    line = next(record.message for record in caplog.records if "again" in record.message)
    assert line.endswith("corpus.jsonl: tokenising again: data.max_samples was 3, is 4")


def test_conversations_become_the_tokenizers_own_chat_with_the_reply_trained(tmp_path, caplog):
    file = tmp_path / "data" / "rows.json"
    file.parent.mkdir()
    rows = [
        {"instruction": "Say hi", "output": "hi"},
        {"instruction": "", "output": "lost"},
        {"instruction": "Count", "output": "one two three " * 9},
    ]
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    tokenizer = make_tokenizer(chat_template=CHAT)
    config = make_config(
        tmp_path, file, {"stage": "sft"}, data_manager_type="lf", append_eod=False, cutoff_len=64
    )
    data = build_run_data(config, tokenizer)
    messages = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "hi"}]
    sample = data.samples[0]
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = sample.labels[sample.labels != -100].tolist()
    assert tokenizer.decode(trained) == "hi<eos>"
    assert data.preview.text == "<user>Say hi<eos><assistant>[[hi<eos>]]"
    report = data.report
    assert (report.rows, report.samples, report.truncated, report.longest) == (3, 2, 1, 64)
    assert [drop.first.rpartition("/")[2] for drop in report.dropped.values()] == ["rows.json:6"]
    assert not built(caplog, config, make_tokenizer(chat_template=CHAT))[1]


def test_overwrite_cache_and_a_damaged_store_tokenise_again(tmp_path, corpus, caplog):
    config = make_config(tmp_path, corpus)
    data, _ = built(caplog, config, make_tokenizer())
    assert built(caplog, make_config(tmp_path, corpus, overwrite_cache=True), make_tokenizer())[1]
    with (data.parts[0].path / "documents.bin").open("ab") as file:
        file.write(b"x")
    assert built(caplog, config, make_tokenizer())[1]
    assert "is damaged" in caplog.text
    assert not built(caplog, config, make_tokenizer())[1]


def test_tokenized_path_is_filled_read_and_guarded(tmp_path, corpus, caplog):
    folder = tmp_path / "tokens"
    config = make_config(tmp_path, corpus, tokenized_path=str(folder))
    data, again = built(caplog, config, make_tokenizer())
    assert again and data.parts[0].path == folder
    assert not built(caplog, config, make_tokenizer())[1]
    changed = {"tokenized_path": str(folder), "max_samples": 3}
    with pytest.raises(UserError, match=r"data.max_samples was None, is 3.*overwrite_cache"):
        build_run_data(make_config(tmp_path, corpus, **changed), make_tokenizer())
    replaced = build_run_data(
        make_config(tmp_path, corpus, overwrite_cache=True, **changed), make_tokenizer()
    )
    assert replaced.report.rows == 3
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="something other than tokenised samples"):
            build_run_data(
                make_config(tmp_path, corpus, tokenized_path=str(foreign), overwrite_cache=overwrite),
                make_tokenizer(),
            )
    assert [file.name for file in foreign.iterdir()] == ["thesis.txt"]


def test_nothing_to_train_on_is_an_error_with_the_table_and_leaves_nothing(tmp_path, corpus):
    write_rows(corpus, ["", " "])
    config = make_config(tmp_path, corpus)
    with pytest.raises(UserError, match=r"none of 2 rows.*empty document: 2 \(first: .*:1\)"):
        build_run_data(config, make_tokenizer())
    assert not [path for path in cache_folder(config).glob("*") if path.is_dir()]


def test_append_eod_without_an_eos_token_is_refused_before_anything_is_written(tmp_path, corpus):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"data\.append_eod"):
        build_run_data(make_config(tmp_path, corpus), tokenizer)


BUILD_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import run_data as t
from shardyard.data.build import build_run_data
file = Path({file!r})
build_run_data(t.make_config(Path({tmp!r}), file, preprocessing_num_workers=2), t.make_tokenizer())
"""


def test_a_build_killed_in_the_middle_leaves_no_store_and_the_next_one_succeeds(tmp_path):
    file = tmp_path / "data" / "big.jsonl"
    file.parent.mkdir()
    write_rows(file, ["some words of a document " * 20] * 30_000)
    config = make_config(tmp_path, file)
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = BUILD_FOR_EVER.format(tests=tests, file=str(file), tmp=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program])
    cache, deadline = cache_folder(config), time.monotonic() + 60
    while not any(path.stat().st_size > 10_000 for path in cache.glob("*/*.bin*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(cache.glob("*/manifest.json"))
    write_rows(file, ["some words"] * 3)
    assert len(build_run_data(config, make_tokenizer()).samples) > 0


class Board:
    """A rendezvous between threads."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def publish(self, key, value):
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=20)
            return self._values[key]


def together(roles, work):
    """Run ``work(role)`` as a thread per rank; results or errors in the order of the ranks."""
    outcomes = queue.Queue()

    def run(rank, role):
        try:
            outcomes.put((rank, work(role)))
        except Exception as error:
            outcomes.put((rank, error))

    threads = [threading.Thread(target=run, args=item) for item in enumerate(roles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome for _, outcome in sorted((outcomes.get() for _ in roles), key=lambda item: item[0])]


def roles_of(nodes, per_node, shared):
    return [
        Role.of(rank=n * per_node + r, local_rank=r, node_rank=n, num_nodes=nodes, shared_file_system=shared)
        for n in range(nodes)
        for r in range(per_node)
    ]


def test_one_rank_of_a_node_works_or_one_of_all_with_a_shared_file_system():
    assert [role.is_leader for role in roles_of(2, 2, shared=False)] == [True, False, True, False]
    assert [role.group for role in roles_of(2, 2, shared=False)] == [0, 0, 1, 1]
    assert [role.is_leader for role in roles_of(2, 2, shared=True)] == [True, False, False, False]
    assert {role.group for role in roles_of(2, 2, shared=True)} == {0}


def test_followers_read_what_the_leader_tokenised(tmp_path, corpus, caplog):
    caplog.set_level(logging.INFO, "shardyard.data")
    board, config, tokenizer = Board(), make_config(tmp_path, corpus), make_tokenizer()
    stores = together(
        roles_of(1, 3, shared=False),
        lambda role: build_run_data(config, tokenizer, role=role, rendezvous=board).samples,
    )
    assert all(isinstance(store, JoinedSamples) for store in stores), stores
    assert len({len(store) for store in stores}) == 1
    assert caplog.text.count("kept in") == 1
    assert all(np.array_equal(stores[0][0].input_ids, store[0].input_ids) for store in stores)


def test_a_file_system_that_is_not_shared_is_named(tmp_path, corpus):
    board = Board()
    elsewhere = PreparedSet("documents", "corpus", str(tmp_path / "rank 0 only"), {})
    board.publish("data/train/0", json.dumps(Prepared("k", (elsewhere,)).to_json()))
    config = make_config(tmp_path, corpus, data_shared_file_system=True)
    with pytest.raises(UserError, match=r"data\.data_shared_file_system"):
        build_run_data(config, make_tokenizer(), role=Role(is_leader=False), rendezvous=board)


def test_the_leaders_fault_ends_every_rank_with_the_same_message(tmp_path):
    board, config = Board(), make_config(tmp_path, tmp_path / "missing.jsonl")
    errors = together(
        roles_of(2, 2, shared=True),
        lambda role: build_run_data(config, make_tokenizer(), role=role, rendezvous=board),
    )
    assert all(isinstance(error, UserError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "missing.jsonl" in str(errors[0])


def test_a_crash_of_the_leader_ends_the_followers_too():
    board = Board()

    def crash():
        raise ZeroDivisionError("oops")

    leader, follower = together(
        roles_of(1, 2, shared=False), lambda role: prepare_once(crash, role, board, "train")
    )
    assert isinstance(leader, ZeroDivisionError)
    assert isinstance(follower, UserError) and "oops" in str(follower)


def test_nodes_with_other_files_are_refused_on_every_rank(tmp_path):
    board = Board()
    errors = together(
        roles_of(2, 2, shared=False),
        lambda role: prepare_once(lambda: Prepared(f"key of node {role.group}"), role, board, "train"),
    )
    assert all(
        isinstance(error, UserError) and "node 1 prepared other samples" in str(error) for error in errors
    )


def test_several_ranks_need_a_rendezvous(tmp_path):
    with pytest.raises(ValueError, match="rendezvous"):
        prepare_once(lambda: Prepared("k"), Role(is_leader=False), None, "train")
