"""Rows to samples in any number of processes, with a stand-in for the encoder."""

import json

import numpy as np
import pytest

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Samples
from shardyard.data.finetune import FinetunePipeline
from shardyard.data.pipeline import batched, run_pipeline
from shardyard.data.sources import resolve_datasets
from shardyard.data.store import StoreWriter
from shardyard.data.types import Sample


class WordEncoder:
    """The lengths of prompt and reply as two tokens; two samples for ``twice``, none for ``never``."""

    def encode(self, conversation):
        prompt, reply = conversation.turns[0].content, conversation.turns[-1].content
        if reply == "never":
            return Dropped("never trained", conversation.where)
        ids = np.array([len(prompt), len(reply)], np.int32)
        one = Sample(ids, np.array([len(reply), -100], np.int32), (2,))
        samples = Samples([one] * (2 if reply == "twice" else 1))
        samples.truncated = len(reply) > 25
        return samples


@pytest.fixture
def entries(tmp_path):
    def write(name, pairs):
        rows = [{"instruction": prompt, "output": reply} for prompt, reply in pairs]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return name

    first = write("a.jsonl", [("q" * n, "r" * (n + 1)) for n in range(1, 30)])
    second = write("b.jsonl", [("q", "never"), ("q", "twice"), ("q", ""), ("q", "never"), ("q", "r")])
    return resolve_datasets([first, second], str(tmp_path))


def run(path, entries, workers=1, max_samples=None, batch_size=4):
    pipeline = FinetunePipeline(entries, WordEncoder(), max_samples=max_samples, batch_size=batch_size)
    with StoreWriter(path) as writer:
        report = run_pipeline(pipeline, writer, workers=workers, total=None)
        return report, writer.finish({})


def test_rows_keep_their_order_and_every_outcome_is_counted(tmp_path, entries):
    report, store = run(tmp_path / "store", entries)
    expected = [[n, n + 1] for n in range(1, 30)] + [[1, 5], [1, 5], [1, 1]]
    assert [store[i].input_ids.tolist() for i in range(len(store))] == expected
    assert (report.rows, report.samples, report.split, report.trained_tokens) == (34, 32, 1, 32)
    assert report.truncated == 5  # replies of 26 to 30 letters
    never = report.dropped["never trained"]
    assert (never.count, never.first.rpartition("/")[2]) == (2, "b.jsonl:1")
    assert sum(drop.count for drop in report.dropped.values()) == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path, entries, workers):
    run(tmp_path / "reference", entries, batch_size=1000)
    run(tmp_path / "store", entries, workers=workers, batch_size=3)
    for file in (tmp_path / "reference").glob("*.bin"):
        assert (tmp_path / "store" / file.name).read_bytes() == file.read_bytes()


def test_max_samples_takes_the_first_rows_of_each_entry(tmp_path, entries):
    report, store = run(tmp_path / "store", entries, max_samples=2)
    assert report.rows == 4
    ids = [store[i].input_ids.tolist() for i in range(len(store))]
    assert ids == [[1, 2], [2, 3], [1, 5], [1, 5]]


def test_batches_hold_all_items():
    assert list(batched(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(batched([], 2)) == []
