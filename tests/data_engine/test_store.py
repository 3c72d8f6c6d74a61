"""Stores of samples: what is written comes back, and a store is complete or absent."""

import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from shardyard.data.folders import read_manifest
from shardyard.data.store import FORMAT, SampleBlock, SampleStore, StoreWriter
from shardyard.data.types import Sample
from shardyard.errors import UserError


def make_samples(count, seed=0):
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        doc_lens = tuple(generator.integers(1, 6, size=generator.integers(1, 4)).tolist())
        ids = generator.integers(0, 150_000, size=sum(doc_lens)).astype(np.int32)
        samples.append(Sample(ids, np.where(ids % 2, ids, -100).astype(np.int32), doc_lens))
    return samples


def write(path, samples, block_size=3, **options):
    with StoreWriter(path) as writer:
        for begin in range(0, len(samples), block_size):
            writer.add(SampleBlock.of(samples[begin : begin + block_size]))
        return writer.finish({"key": "k"}, **options)


def plain(samples):
    return [(s.input_ids.tolist(), s.labels.tolist(), s.doc_lens) for s in samples]


def test_samples_come_back_as_they_were_written(tmp_path):
    samples = make_samples(20)
    store = write(tmp_path / "store", samples)
    assert len(store) == 20
    assert plain(store[i] for i in range(20)) == plain(samples)
    assert store[0].input_ids.dtype == store[0].labels.dtype == np.int32
    with pytest.raises(IndexError):
        store[20]


def test_bytes_do_not_depend_on_the_blocks(tmp_path):
    samples = make_samples(10)
    for block_size in (1, 4, 10):
        write(tmp_path / str(block_size), samples, block_size)
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / str(size)).iterdir()} for size in (1, 4, 10)
    ]
    assert contents[0] == contents[1] == contents[2]


def test_another_process_gets_the_path_only(tmp_path):
    samples = make_samples(50)
    store = write(tmp_path / "store", samples)
    sent = pickle.dumps(store)
    assert len(sent) < 500
    assert plain(pickle.loads(sent)[i] for i in range(50)) == plain(samples)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "store") as writer:
        writer.add(SampleBlock.of(make_samples(2)))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def fill_for_ever(path):
    writer = StoreWriter(path)
    while True:
        writer.add(SampleBlock.of(make_samples(5)))


def test_a_killed_writer_leaves_no_store_and_the_next_one_cleans_up(tmp_path):
    path = tmp_path / "store"
    process = multiprocessing.get_context("fork").Process(target=fill_for_ever, args=(path,))
    process.start()
    while not list(tmp_path.glob("store.tmp-*/doc_lens.bin")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    write(path, make_samples(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_a_store_that_another_process_finished_first_is_kept_unless_replacing(tmp_path):
    path = tmp_path / "store"
    with StoreWriter(path) as late:
        late.add(SampleBlock.of(make_samples(1, seed=1)))
        first = write(path, make_samples(2))
        assert len(late.finish({"key": "k"})) == 2
    assert len(write(path, make_samples(3), replace=True)) == 3
    assert len(first) == 2, "a reader of the replaced store lost its samples"
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "store").mkdir()
    assert len(write(tmp_path / "store", make_samples(2))) == 2


def test_damage_and_other_formats_are_refused(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(UserError, match="is not a folder of tokenised samples"):
        SampleStore.open(path)
    write(path, make_samples(4))
    with (path / "labels.bin").open("ab") as file:
        file.write(b"0")
    with pytest.raises(UserError, match=r"labels\.bin is damaged"):
        SampleStore.open(path)
    (path / "labels.bin").unlink()
    with pytest.raises(UserError, match="no file"):
        SampleStore.open(path)
    text = (path / "manifest.json").read_text(encoding="utf-8")
    newer = text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}')
    (path / "manifest.json").write_text(newer, encoding="utf-8")
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}"):
        SampleStore.open(path)
    (path / "manifest.json").write_text(text[:20], encoding="utf-8")
    assert read_manifest(path) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write the tokenised samples to .*file/store"):
        StoreWriter(tmp_path / "file" / "store")


def test_a_block_whose_arrays_do_not_fit_is_refused(tmp_path):
    block = SampleBlock.of(make_samples(2))
    broken = SampleBlock(block.input_ids, block.labels[:-1], block.lengths, block.doc_lens, block.doc_counts)
    with StoreWriter(tmp_path / "store") as writer, pytest.raises(ValueError, match="do not fit"):
        writer.add(broken)
