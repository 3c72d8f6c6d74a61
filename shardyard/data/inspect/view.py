"""The samples of a run under one numbering, and what is known of each.

Legend: N samples of all data sets, numbered as training numbers them: those of the first data set, then those
of the second ... Of a stream, those of its first windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from shardyard.config import Config
from shardyard.data import sources
from shardyard.data.build import RunData
from shardyard.data.eval_sets import CountedSamples
from shardyard.data.indexed import IndexedReader, MegatronSamples, WindowSamples
from shardyard.data.mixing import kept_for_validation, packs
from shardyard.data.order import Order, Units
from shardyard.data.parts import JoinedSamples, token_prefix
from shardyard.data.prepare import Preparation
from shardyard.data.report import Report
from shardyard.data.sampler import ElasticSampler
from shardyard.data.sets import resolve_sets
from shardyard.data.sources import DatasetEntry
from shardyard.data.store import FLAG_LOST_THOUGHT, FLAG_TRUNCATED, SampleStore
from shardyard.data.stream.build import Stream
from shardyard.data.stream.window import Window
from shardyard.data.types import IGNORE_INDEX, Sample


@dataclass(frozen=True)
class Source:
    """One data set: its samples are ``first`` to ``first + count - 1``, both 0 where nobody can tell.

    ``entry`` has its rows, ``store`` what is known of each of its samples, ``documents`` its token files;
    each may be absent.
    """

    name: str
    path: Path
    report: Report
    first: int
    count: int
    entry: DatasetEntry | None = None
    store: SampleStore | None = None
    documents: IndexedReader | None = None


@dataclass(frozen=True)
class View:
    """The samples of a run.

    ``order`` gives the units of epoch 0; ``held_out`` int64, ascending, are the samples that are for
    validation. ``stretch`` says which part of a stream this is.
    """

    samples: CountedSamples
    sources: tuple[Source, ...]
    total: Report
    order: Order
    cutoff_len: int
    held_out: np.ndarray
    is_packed: bool = False
    stretch: str | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        samples = self.samples
        if isinstance(samples, JoinedSamples):
            pieces = [_lengths(part, self.cutoff_len) for part in samples.parts]
            return np.concatenate([np.empty(0, np.int64), *pieces])
        return _lengths(samples, self.cutoff_len)

    @cached_property
    def trained(self) -> np.ndarray:
        """Trained tokens of each sample, int64 [N]; reads all of them."""
        counts = (np.count_nonzero(self.samples[n].labels != IGNORE_INDEX) for n in range(len(self)))
        return np.fromiter(counts, np.int64, len(self))

    def source_of(self, number: int) -> Source:
        """The data set that a sample is of; the only one where samples are not told apart."""
        for source in self.sources:
            if source.first <= number < source.first + source.count:
                return source
        return self.sources[0]

    def flags_of(self, number: int) -> int:
        """What was left out of a sample; 0 where nothing was, or nobody knows."""
        source = self.source_of(number)
        return 0 if source.store is None else int(source.store.flags[number - source.first])

    @property
    def truncated(self) -> np.ndarray | None:
        """The numbers of the samples that were cut; None where samples do not say so."""
        if all(source.store is None for source in self.sources):
            return None
        found = [
            source.first + np.flatnonzero(source.store.flags & FLAG_TRUNCATED)
            for source in self.sources
            if source.store is not None
        ]
        return np.concatenate(found).astype(np.int64)

    def place_of(self, number: int) -> str | None:
        """Where the row of a sample stands in its file; looked up there. None where it is not known."""
        source = self.source_of(number)
        if source.store is None or source.entry is None:
            return None
        row = int(source.store.rows[number - source.first])
        if row < 0:
            return None
        found = next(islice(sources.iter_rows(source.entry, skip=row, on_bad_row="skip"), 1), None)
        return None if found is None else found.where

    def unit(self, number: int) -> tuple[int, ...]:
        """The samples of a unit (sample or pack) of epoch 0, in training order."""
        return self.order.units(0, number, number + 1)[0]

    def document_ends(self, number: int) -> np.ndarray:
        """Where documents end inside a sample, before its last token: ascending, int64."""
        samples, local = self.samples, number
        if isinstance(samples, JoinedSamples):
            samples, local = samples.locate(number)
        sample = samples[local]
        if isinstance(samples, WindowSamples | MegatronSamples):
            ends = samples.document_ends(local)
        else:
            ends = np.cumsum(sample.doc_lens, dtype=np.int64)
        return ends[ends < len(sample.input_ids)]


LEFT_OUT = {FLAG_TRUNCATED: "truncated", FLAG_LOST_THOUGHT: "a thought left out"}
"""What the flags of a sample mean, in words."""


def view_of(config: Config, data: RunData, tokenizer: object, *, windows: int = 1) -> View:
    """The samples of ``data``; of a stream those of its first ``windows`` windows, which are made now.

    Raises:
        UserError: a window of a stream cannot be made, or the sets of Megatron's index cannot be read.
    """
    if data.stream is not None:
        return _stream_view(config, data.stream, windows)
    assert isinstance(data.sampler, ElasticSampler)
    if isinstance(data.samples, MegatronSamples):
        found, held_out = _megatron_sources(config, data, tokenizer), np.empty(0, np.int64)
    else:
        assert isinstance(data.samples, JoinedSamples)
        found, held_out = _sources(config, data), kept_for_validation(config, data.samples)
    return View(
        data.samples,
        found,
        data.report,
        data.sampler.order,
        config.data.cutoff_len,
        held_out,
        is_packed=packs(config),
    )


def _sources(config: Config, data: RunData) -> tuple[Source, ...]:
    named = resolve_sets(config, config.data.dataset)
    found, first = [], 0
    for part, one in zip(data.parts, named, strict=True):
        samples = part.samples
        source = Source(part.name, part.path, part.report, first, len(samples), entry=one.entry)
        if isinstance(samples, SampleStore):
            source = replace(source, store=samples)
        if isinstance(samples, WindowSamples):
            source = replace(source, documents=samples.reader)
        found.append(source)
        first += len(samples)
    return tuple(found)


def _megatron_sources(config: Config, data: RunData, tokenizer: object) -> tuple[Source, ...]:
    """The sets of a blend; which samples are of which, their index does not say in passing."""
    again = config.model_copy(update={"data": config.data.model_copy(update={"overwrite_cache": False})})
    prepared = Preparation(again, tokenizer).run(config.data.dataset)
    return tuple(
        Source(
            one.name, Path(one.path), Report.from_json(one.report), 0, 0,
            documents=IndexedReader(token_prefix(one)),
        )
        for one in prepared.sets
    )  # fmt: skip


def _stream_view(config: Config, stream: Stream, wanted: int) -> View:
    found: list[Window] = []
    while len(found) < wanted and (window := stream.store.window(len(found))) is not None:
        found.append(window)
    report = Report.total([window.report for window in found])
    samples = JoinedSamples([_OfWindow(window) for window in found])
    shifted = [
        (window.units.indices + samples.starts[number], np.diff(window.units.offsets))
        for number, window in enumerate(found)
    ]
    lengths = np.concatenate([sizes for _, sizes in shifted])
    units = Units(
        np.concatenate([indices for indices, _ in shifted]), np.concatenate([[0], np.cumsum(lengths)])
    )
    ended = len(found) < wanted
    stretch = f"the first {len(found)} window(s) of {config.data.buffer_size} rows of the stream"
    stretch += ", which are the whole epoch" if ended else ""
    source = Source("the stream", stream.folder, report, 0, len(samples))
    return View(
        samples, (source,), report, _Listed(units), config.data.cutoff_len, np.empty(0, np.int64),
        is_packed=packs(config), stretch=stretch,
    )  # fmt: skip


class _OfWindow:
    """The samples of a window of a stream."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def __len__(self) -> int:
        return self._window.num_samples

    def __getitem__(self, index: int) -> Sample:
        return self._window.sample(index)


class _Listed:
    """An order of one epoch whose units are known already."""

    shuffled = False

    def __init__(self, units: Units) -> None:
        self._units = units

    def size(self, epoch: int) -> int:
        return len(self._units)

    def units(self, epoch: int, begin: int, end: int) -> Units:
        return self._units.part(begin, end)

    def describe(self) -> str:
        return "the windows of a stream"


def _lengths(samples: CountedSamples, cutoff_len: int) -> np.ndarray:
    if isinstance(samples, SampleStore):
        return samples.lengths
    lengths = np.full(len(samples), cutoff_len, np.int64)
    if isinstance(samples, MegatronSamples):
        return lengths
    if isinstance(samples, WindowSamples):
        if len(lengths):  # the last window is as short as the stream leaves it
            lengths[-1] = samples.num_tokens - 1 - (len(samples) - 1) * cutoff_len
        return lengths
    return np.fromiter((len(samples[n].input_ids) for n in range(len(samples))), np.int64, len(samples))


def numbers_of(view: View, chosen: Sequence[Source]) -> np.ndarray:
    """The samples of these data sets that are trained (not held out), ascending."""
    pieces = [np.arange(one.first, one.first + one.count, dtype=np.int64) for one in chosen]
    numbers = np.concatenate([np.empty(0, np.int64), *pieces])
    return np.setdiff1d(numbers, view.held_out, assume_unique=True)
