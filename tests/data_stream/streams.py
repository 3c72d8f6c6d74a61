"""Streams over small files of rows that carry a number, with a stand-in for the encoder."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.config import Config
from shardyard.data.dropped import Dropped
from shardyard.data.encode import Samples
from shardyard.data.sources import resolve_datasets
from shardyard.data.stream.build import Seat, Stream, open_stream
from shardyard.data.stream.tokenise import Conversations
from shardyard.data.types import Sample

CUTOFF = 8


class NumberEncoder:
    """Row n becomes its number, 1 + n % 4 times; ``drop`` makes no sample, ``twice`` two of them."""

    def encode(self, conversation):
        number, reply = int(conversation.turns[0].content), conversation.turns[1].content
        if reply == "drop":
            return Dropped("asked to be dropped", conversation.where)
        ids = np.full(1 + number % 4, number, np.int32)
        return Samples([Sample(ids, ids.copy(), (len(ids),))] * (2 if reply == "twice" else 1))


def write_rows(file: Path, numbers, reply=lambda number: "r") -> str:
    """Rows of these numbers; ``reply(number)`` decides what becomes of one. The file's name."""
    rows = [{"instruction": str(number), "output": reply(number)} for number in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file.name


def make_config(folder: Path, names, *, training=None, **data) -> Config:
    return Config.model_validate(
        {
            "model": {"model_name_or_path": "m", "cache_dir": str(folder / "cache")},
            "data": {
                "dataset": tuple(names),
                "dataset_dir": str(folder),
                "streaming": True,
                "cutoff_len": CUTOFF,
                **data,
            },
            "training": {"output_dir": str(folder / "out"), "max_steps": 1000, **(training or {})},
        }
    )


def open_numbers(
    folder: Path,
    names,
    *,
    run="run",
    leads=True,
    global_batch=4,
    look_ahead=False,
    training=None,
    **data: Any,
) -> Stream:
    """The stream of files that ``write_rows`` wrote into ``folder``."""
    config = make_config(folder, names, training=training, **data)
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    method = Conversations(entries, NumberEncoder(), capacity=CUTOFF if config.data.packing else None)
    seat = Seat(folder / "stream", "key", run, leads)
    return open_stream(config, entries, method, seat, global_batch=global_batch, look_ahead=look_ahead)


def numbers_of(stream: Stream, batch) -> list[int]:
    """The numbers of the rows in a global batch, in training order."""
    return [int(stream.store[index].input_ids[0]) for index in batch.indices.tolist()]


def batches(stream: Stream, epochs: int, cursor: int = 0):
    """(batch, its numbers) from a cursor to the end of so many epochs."""
    found = []
    while (batch := stream.sampler.global_batch_at(cursor)).epoch < epochs:
        found.append((batch, numbers_of(stream, batch)))
        cursor = batch.end
    return found


def by_epoch(found) -> list[list[int]]:
    """The numbers of each epoch, in training order."""
    seen: dict[int, list[int]] = defaultdict(list)
    for batch, numbers in found:
        seen[batch.epoch] += numbers
    return [seen[epoch] for epoch in sorted(seen)]


def steps_of_ranks(
    folder: Path, names, *, ranks: int, workers: int, epochs: int, cursor: int = 0, step: int = 0, **options
):
    """What all ranks of a run read, one after the other in this process.

    (epoch, start, end, sorted numbers of all ranks, micro-batches of each rank) of each step.
    """
    from shardyard.data.batches import BatchLoader  # torch: not for the processes that tests start

    steps: list[list[Any]] = []
    streams = [open_numbers(folder, names, leads=rank == 0, **options) for rank in range(ranks)]
    try:
        for rank, stream in enumerate(streams):
            loader = BatchLoader(
                stream.store, stream.sampler, dp_rank=rank, dp_size=ranks, per_device=2,
                start_cursor=cursor, start_step=step, num_workers=workers,
            )  # fmt: skip
            steps.append([])
            for batch in loader:
                if batch.epoch == epochs:
                    break
                numbers = [n for m in batch.micro_batches for n in _documents(m)]
                steps[-1].append((batch.epoch, batch.start, batch.end, len(batch.micro_batches), numbers))
    finally:
        for stream in streams:
            stream.close()
    joined = []
    for of_ranks in zip(*steps, strict=True):
        assert len({fields[:4] for fields in of_ranks}) == 1, "ranks disagree on a batch"
        joined.append((*of_ranks[0][:3], sorted(n for fields in of_ranks for n in fields[4])))
    return joined


def _documents(micro_batch) -> list[int]:
    if not micro_batch.sample_ids:
        return []
    assert len(micro_batch.sample_ids) == len(micro_batch.doc_lens)
    starts = np.cumsum([0, *micro_batch.doc_lens[:-1]])
    return micro_batch.input_ids[starts].tolist()
