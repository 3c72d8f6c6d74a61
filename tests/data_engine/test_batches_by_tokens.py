"""Micro-batches by tokens and by length through the loader: every sample once, whatever the ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_stream.streams import open_numbers
from data_stream.streams import write_rows as write_numbers
from support.run_data import CHAT, make_config, make_tokenizer, write_pairs, write_rows

from shardyard.config import Config
from shardyard.data.batches import BatchLoader
from shardyard.data.build import build_run_data, longest_unit
from shardyard.data.cut import Cut, doc_lens_of
from shardyard.data.indexed import IndexedWriter
from shardyard.data.order import EpochOrder, PackedOrder
from shardyard.data.parts import ChosenSamples, JoinedSamples
from shardyard.data.preprocess import PackedSamples
from shardyard.data.sampler import ElasticSampler
from shardyard.data.types import Sample, StepBatch

LENGTHS = [1 + (7 * number) % 23 for number in range(29)]
BY_TOKENS = Cut(2, max_tokens=30, even_at=100)
CUTS = [BY_TOKENS, Cut(2, max_tokens=15), Cut(2, by_length=True)]


def sample(number: int, length: int) -> Sample:
    ids = 100 * number + np.arange(length, dtype=np.int32)
    return Sample(ids, np.append(ids[1:], -100).astype(np.int32), (length,))


STORE = [sample(number, length) for number, length in enumerate(LENGTHS)]


def sampler_of(global_batch: int, epochs: float = 2.0, order: Any = None) -> ElasticSampler:
    return ElasticSampler(
        order or EpochOrder(len(LENGTHS), seed=3, shuffle=True),
        global_batch=global_batch, drop_last=False, num_train_epochs=epochs, max_steps=-1,
    )  # fmt: skip


def load(sampler: ElasticSampler, ranks: int, cut: Cut, **options: Any) -> list[tuple[StepBatch, ...]]:
    """Every step, as all ranks get it."""
    loaders = [
        BatchLoader(STORE, sampler, dp_rank=rank, dp_size=ranks, per_device=2, cut=cut, **options)
        for rank in range(ranks)
    ]
    return list(zip(*loaders, strict=True))


def ids_of(step: tuple[StepBatch, ...]) -> list[int]:
    return [number for batch in step for part in batch.micro_batches for number in part.sample_ids]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("cut", CUTS, ids=["tokens", "few tokens", "length"])
def test_all_ranks_together_read_every_sample_once_an_epoch(ranks: int, cut: Cut) -> None:
    plain = load(sampler_of(2 * ranks), ranks, Cut(2))
    steps = load(sampler_of(2 * ranks), ranks, cut)
    assert [sorted(ids_of(step)) for step in steps] == [sorted(ids_of(step)) for step in plain], (
        "the same batches"
    )
    seen = {0: [], 1: []}
    for step in steps:
        assert len({(len(s.micro_batches), s.epoch, s.start, s.end, s.size) for s in step}) == 1
        seen[step[0].epoch] += ids_of(step)
        for part in (part for batch in step for part in batch.micro_batches):
            assert part.num_tokens == sum(LENGTHS[number] for number in part.sample_ids)
            wanted = [token for number in part.sample_ids for token in STORE[number].input_ids.tolist()]
            assert part.input_ids.tolist() == (wanted or [0])
            if cut.max_tokens is not None and len(part.sample_ids) > 1:
                assert part.num_tokens <= cut.max_tokens
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_resume_on_other_ranks_sees_each_sample_once(ranks: int) -> None:
    before = load(sampler_of(8), 4, BY_TOKENS)[:5]
    cursor = before[-1][0].end
    assert len(LENGTHS) < cursor < 2 * len(LENGTHS), "in the middle of epoch 1"
    after = load(sampler_of(3 * ranks), ranks, BY_TOKENS, start_cursor=cursor)
    ids = [number for step in (*before, *after) for number in ids_of(step)]
    everything = list(range(len(LENGTHS)))
    assert [sorted(ids[: len(LENGTHS)]), sorted(ids[len(LENGTHS) :])] == [everything] * 2


def test_worker_processes_change_nothing() -> None:
    def contents(**options: Any) -> list[Any]:
        steps = load(sampler_of(12), 2, BY_TOKENS, **options)
        parts = [part for step in steps for batch in step for part in batch.micro_batches]
        return [(p.sample_ids, p.doc_lens, p.input_ids.tolist(), p.labels.tolist()) for p in parts]

    assert contents() == contents(num_workers=2)


def test_packs_are_cut_whole_and_joined_ones_cost_as_one_document() -> None:
    """Two packs of 20 tokens: one of four documents, one of a single document."""
    store = [sample(number, length) for number, length in enumerate([20, 5, 5, 5, 5, 1])]
    order = PackedOrder(
        EpochOrder(6, seed=0, shuffle=False), np.array([20, 5, 5, 5, 5, 1]), capacity=20, window=6
    )
    sampler = sampler_of(3, 1.0, order)
    for merge, wanted in ((False, [(0,), (1, 2, 3, 4, 5)]), (True, [(0, 5), (1, 2, 3, 4)])):
        loaders = [
            BatchLoader(
                store, sampler, dp_rank=rank, dp_size=2, per_device=9, merge_packs=merge,
                cut=Cut(9, max_tokens=40, even_at=1),
            )
            for rank in range(2)
        ]  # fmt: skip
        (step,) = zip(*loaders, strict=True)
        shares = [tuple(n for part in batch.micro_batches for n in part.sample_ids) for batch in step]
        assert sorted(map(tuple, map(sorted, shares))) == wanted, merge


def lengths_are_known(samples: Any, indices: Any, *, counted: bool = True) -> None:
    """`doc_lens` says of each sample what reading it does."""
    read = [tuple(samples[int(index)].doc_lens) for index in indices]
    assert [tuple(doc_lens_of(samples, int(index))) for index in indices] == read
    assert hasattr(samples, "doc_lens") and read
    if counted:
        with pytest.raises(IndexError):
            samples.doc_lens(len(samples))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"reset_attention_mask": True},
        {"index_compat": "megatron"},
        {"index_compat": "megatron", "reset_attention_mask": True},
    ],
    ids=str,
)
def test_windows_know_their_documents(tmp_path: Path, data: dict[str, Any]) -> None:
    write_rows(tmp_path / "t.jsonl", ["four", "a", "", "quite a long text of many windows", "b", "cc"])
    training = {"disable_shuffling": False}
    config = make_config(tmp_path, tmp_path / "t.jsonl", training, **data)
    samples: Any = build_run_data(config, make_tokenizer()).samples
    lengths_are_known(samples, range(len(samples)))


def test_stores_and_choices_of_them_know_their_documents(tmp_path: Path) -> None:
    write_pairs(tmp_path / "p.jsonl", 6)
    config = make_config(
        tmp_path,
        tmp_path / "p.jsonl",
        {"stage": "sft"},
        data_manager_type="lf",
        append_eod=False,
        cutoff_len=64,
    )
    data = build_run_data(config, make_tokenizer(chat_template=CHAT))
    samples: Any = data.samples
    assert isinstance(samples, JoinedSamples)
    lengths_are_known(samples, range(len(samples)))
    lengths_are_known(samples.parts[0], range(len(samples)))
    chosen = ChosenSamples(samples, np.array([4, 1]))
    assert [chosen.doc_lens(n) for n in range(2)] == [samples[4].doc_lens, samples[1].doc_lens]
    assert longest_unit(config, data) == max(len(samples[n].input_ids) for n in range(len(samples)))
    packed = Config.model_validate(
        {**config.model_dump(), "data": {**config.model_dump()["data"], "packing": True}}
    )
    assert longest_unit(packed, data) == 64


def test_samples_that_only_hold_tokens_are_read() -> None:
    assert [doc_lens_of(STORE, number) for number in range(3)] == [(1,), (8,), (15,)]


def test_packed_files_know_their_documents(tmp_path: Path) -> None:
    parts = {
        "input_ids": [[5, 6, 7, 8, 0], [9, 9, 9, 9, 9]],
        "attention_mask": [[1, 1, 2, 2, 0], [1, 2, 2, 2, 3]],
        "labels": [[5, 6, 7, 8, 0], [9, 9, 9, 9, 9]],
    }
    for name, documents in parts.items():
        with IndexedWriter(tmp_path / f"x_packed_{name}_document", np.int32) as writer:
            for document in documents:
                writer.add_document(np.array(document, np.int32))
            writer.finish()
    samples = PackedSamples(tmp_path / "x")
    assert [samples.doc_lens(number) for number in range(2)] == [(2, 2), (1, 3, 1)]
    lengths_are_known(samples, range(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_cut_by_tokens_too(tmp_path: Path, workers: int) -> None:
    """Row n of the stream has 1 + n % 4 tokens, so a batch of 6 from windows of 5 has about 15."""
    write_numbers(tmp_path / "rows.jsonl", range(13))
    streams = [
        open_numbers(tmp_path, ["rows.jsonl"], leads=rank == 0, global_batch=6, buffer_size=5)
        for rank in range(2)
    ]
    try:
        loaders = [
            BatchLoader(
                stream.store, stream.sampler, dp_rank=rank, dp_size=2, per_device=9, num_workers=workers,
                cut=Cut(9, max_tokens=5),
            )
            for rank, stream in enumerate(streams)
        ]  # fmt: skip
        seen: dict[int, list[int]] = {0: [], 1: []}
        for step in zip(*loaders, strict=True):
            if step[0].epoch > 1:
                break
            parts = [part for batch in step for part in batch.micro_batches]
            assert len({len(batch.micro_batches) for batch in step}) == 1
            assert all(part.num_tokens <= 5 for part in parts)
            starts = [np.cumsum([0, *part.doc_lens[:-1]]) for part in parts if part.sample_ids]
            real = [part for part in parts if part.sample_ids]
            for part, begins in zip(real, starts, strict=True):
                seen[step[0].epoch] += part.input_ids[begins].tolist()
        assert [sorted(numbers) for numbers in seen.values()] == [list(range(13))] * 2
        lengths_are_known(streams[0].store, streams[0].sampler.global_batch_at(0).indices, counted=False)
    finally:
        for stream in streams:
            stream.close()


class Copies:
    """Stands for the device's stream: a copy is another tensor; its start and its use are written down."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, tensor: torch.Tensor) -> Any:
        number = sum(line.startswith("start") for line in self.log)
        self.log.append(f"start {number}")

        def wait() -> torch.Tensor:
            self.log.append(f"wait {number}")
            return tensor.clone()

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_on_its_way_while_the_one_before_is_trained(workers: int) -> None:
    copies: Any = Copies()

    def contents(**options: Any) -> list[Any]:
        loader = BatchLoader(
            STORE,
            sampler_of(12),
            dp_rank=1,
            dp_size=2,
            per_device=2,
            num_workers=workers,
            cut=BY_TOKENS,
            **options,
        )
        steps = []
        for step in loader:
            copies.log.append(f"train {len(steps)}")
            parts = [(p.sample_ids, p.input_ids.tolist(), p.labels.tolist()) for p in step.micro_batches]
            steps.append((step.epoch, step.start, step.end, step.size, parts))
        return steps

    plain = contents()
    copies.log.clear()
    assert contents(copies=copies) == plain and len(plain) == 6
    wanted = ["start 0"]
    for number in range(6):
        wanted += [f"start {number + 1}"] * (number < 5) + [f"wait {number}", f"train {number}"]
    assert copies.log == wanted
