"""What training reads: the prepared data sets of a run as one sequence of numbered samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from shardyard.config import Config, DataConfig
from shardyard.data.cut import doc_lens_of
from shardyard.data.eval_sets import CountedSamples
from shardyard.data.indexed import IndexedReader, WindowSamples, split_documents
from shardyard.data.leader import PreparedSet
from shardyard.data.prepare import DOCUMENTS
from shardyard.data.preprocess.packed import PackedSamples
from shardyard.data.report import Report
from shardyard.data.store import SampleStore
from shardyard.data.types import Sample
from shardyard.errors import UserError


@dataclass(frozen=True)
class Part:
    """The samples of one data set, and what became of its rows."""

    name: str
    samples: CountedSamples
    report: Report
    path: Path
    weight: float | None = None


class JoinedSamples:
    """The samples of several parts under one numbering: those of part 0, then those of part 1, ..."""

    def __init__(self, parts: Sequence[CountedSamples]) -> None:
        self.parts = tuple(parts)
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        """Where each part begins, int64 [parts + 1]."""
        self._starts = self.starts.tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part, index = self.locate(index)
        return part[index]

    def doc_lens(self, index: int) -> Sequence[int]:
        """The documents of a sample."""
        return doc_lens_of(*self.locate(index))

    def locate(self, index: int) -> tuple[CountedSamples, int]:
        """The part that holds a sample, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._starts, index) - 1
        return self.parts[part], index - self._starts[part]

    def numbers(self, part: int) -> np.ndarray:
        """The numbers of a part's samples, int64."""
        return np.arange(self._starts[part], self._starts[part + 1], dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]; for parts that know theirs (not windows of a token stream)."""
        of_parts = [part.lengths for part in self.parts]  # type: ignore[attr-defined]
        return np.concatenate([np.empty(0, np.int64), *of_parts])


class ChosenSamples:
    """Some of the samples of ``samples``, by number."""

    def __init__(self, samples: CountedSamples, numbers: np.ndarray) -> None:
        self._samples = samples
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[int(self._numbers[index])]

    def doc_lens(self, index: int) -> Sequence[int]:
        """The documents of a sample."""
        return doc_lens_of(self._samples, int(self._numbers[index]))


def open_part(config: Config, prepared: PreparedSet, number: int) -> Part:
    """The training samples of data set ``number``, opened by any rank of the leader's group.

    Raises:
        UserError: it is not to be seen from this machine, or damaged.
    """
    _check_seen(config, prepared)
    report, path = Report.from_json(prepared.report), Path(prepared.path)
    if prepared.kind == "samples":
        return Part(prepared.name, SampleStore.open(path), report, path, prepared.weight)
    if prepared.kind == "packed":
        return Part(prepared.name, PackedSamples(path), report, path, prepared.weight)
    documents = _documents(config, prepared, "train")
    samples = _windows(config, prepared, number, documents, shuffled=not config.training.disable_shuffling)
    if not len(samples):
        raise UserError(
            f"data.dataset: {prepared.name}: no sample is left to train on ({samples.num_tokens} tokens, "
            f"data.split {config.data.split})"
        )
    report = window_report(report, config.data, samples, documents)
    return Part(prepared.name, samples, report, path, prepared.weight)


def open_held_out(config: Config, prepared: PreparedSet, number: int) -> CountedSamples:
    """The documents that ``data.split`` keeps for validation, as windows in their own order."""
    return _windows(config, prepared, number, _documents(config, prepared, "valid"), shuffled=False)


def open_whole(config: Config, prepared: PreparedSet) -> Part:
    """All samples of a data set that is for validation, in their own order."""
    _check_seen(config, prepared)
    report, path = Report.from_json(prepared.report), Path(prepared.path)
    if prepared.kind == "samples":
        return Part(prepared.name, SampleStore.open(path), report, path)
    if prepared.kind == "packed":
        return Part(prepared.name, PackedSamples(path), report, path)
    documents = range(IndexedReader(token_prefix(prepared)).num_documents)
    samples = _windows(config, prepared, 0, documents, shuffled=False)
    return Part(prepared.name, samples, window_report(report, config.data, samples, documents), path)


def token_prefix(prepared: PreparedSet) -> Path:
    """The prefix of its .bin/.idx."""
    path = Path(prepared.path)
    return path / DOCUMENTS if prepared.kind == "documents" else path


def window_report(report: Report, data: DataConfig, windows: WindowSamples, documents: range) -> Report:
    """The counts of documents, with those of the windows over ``documents``."""
    num_inputs = max(windows.num_tokens - 1, 0)
    longest = min(data.cutoff_len, num_inputs)
    untrained = 0
    if data.reset_attention_mask:  # the last token of each document but the stream's last
        lengths = np.diff(windows.reader.document_offsets(documents.start, documents.stop))
        untrained = max(int(np.count_nonzero(lengths)) - 1, 0)
    return replace(
        report,
        samples=len(windows),
        tokens=num_inputs,
        trained_tokens=num_inputs - untrained,
        longest=longest,
        shortest=num_inputs - (len(windows) - 1) * longest if len(windows) else 0,
    )


def _documents(config: Config, prepared: PreparedSet, which: Literal["train", "valid"]) -> range:
    splits = split_documents(config.data.split, IndexedReader(token_prefix(prepared)).num_documents)
    return getattr(splits, which)


def _windows(
    config: Config, prepared: PreparedSet, number: int, documents: range, *, shuffled: bool
) -> WindowSamples:
    return WindowSamples(
        token_prefix(prepared), config.data.cutoff_len, seed=config.training.seed if shuffled else None,
        reset_attention_mask=config.data.reset_attention_mask, first=documents.start, last=documents.stop,
        stream=number,
    )  # fmt: skip


def _check_seen(config: Config, prepared: PreparedSet) -> None:
    folder = Path(prepared.path) if prepared.kind in ("samples", "documents") else Path(prepared.path).parent
    if config.data.data_shared_file_system and not folder.exists():
        raise UserError(
            f"data.data_shared_file_system: true, but {folder}, which rank 0 wrote, is not to be seen from "
            "this machine; put model.cache_dir or data.tokenized_path on the shared file system, or set it "
            "to false"
        )
