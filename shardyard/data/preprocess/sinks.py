"""Where outcomes end: the indexed data sets of one output, written complete or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed import IndexedWriter, bin_path, idx_path
from shardyard.data.packing import best_fit
from shardyard.data.types import IGNORE_INDEX

PACK_WINDOW = 1000
"""Samples among which packs are sought."""

_WINDOW_TOKENS = 1 << 22
"""Tokens after which a window ends early, so that memory does not grow with the length of samples."""

LABEL_DTYPE = np.dtype("<i4")
"""Of labels (which may be -100) and masks, whatever the ids' type is."""

SFT_PARTS = ("input_ids", "attention_mask", "labels")
PAIR_PARTS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")


def part_prefix(prefix: Path, part: str) -> Path:
    """The data set of one part of packed samples."""
    return prefix.with_name(f"{prefix.name}_packed_{part}_document")


def files_of(prefixes: list[Path]) -> list[Path]:
    """The two files of each data set."""
    return [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]


class Output:
    """Several writers as one: a context manager; leaving it without ``finish`` leaves nothing behind."""

    def __init__(self, writers: dict[Path, Any]) -> None:
        """``writers``: the type of the ids of each data set."""
        self.prefixes = list(writers)
        self._writers: list[IndexedWriter] = []
        self._stack = contextlib.ExitStack()
        try:
            for prefix, dtype in writers.items():
                self._writers.append(self._stack.enter_context(IndexedWriter(prefix, dtype)))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, *columns: tuple[np.ndarray, np.ndarray]) -> None:
        """Append documents: for each data set their tokens end to end, and how many each one has."""
        for writer, (tokens, lengths) in zip(self._writers, columns, strict=True):
            writer.add_documents(tokens, lengths)

    @property
    def documents(self) -> int:
        return self._writers[0].num_documents

    def tokens(self, number: int = 0) -> int:
        """Tokens of one of the data sets."""
        return self._writers[number].num_tokens

    def finish(self) -> None:
        """Give the files their names. Without all indexes there is no output: old ones go first."""
        for prefix in self.prefixes:
            idx_path(prefix).unlink(missing_ok=True)
        for writer in self._writers:
            writer.finish()


class DocumentSink:
    """Writes documents and keeps the extremes that a report tells."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.output = Output({prefix: dtype})
        self._dtype = dtype
        self.largest_id = -1
        self.longest = 0

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        if len(tokens):
            self.largest_id = max(self.largest_id, int(tokens.max()))
            self.longest = max(self.longest, int(lengths.max()))
        self.output.add((tokens, lengths))

    def close(self) -> None:
        """Nothing is held back."""

    def counts(self) -> dict[str, Any]:
        return {
            "documents": self.output.documents,
            "tokens": self.output.tokens(),
            "type of the ids": self._dtype.name,
            "largest id": self.largest_id,
            "longest document": self.longest,
        }


class PackedSink:
    """Writes samples as sequences of ``input_ids``, ``attention_mask`` and ``labels``.

    The mask numbers the samples of a sequence 1, 2, 3 ...; 0 marks padding. With ``pack_into`` several
    samples share a sequence of at most so many tokens: best fit among windows of samples. ``pad_id`` fills
    sequences up to a multiple of ``multiple_of``.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, *, pack_into: int | None, multiple_of: int = 1, pad_id: int = 0
    ) -> None:
        dtypes = (dtype, LABEL_DTYPE, LABEL_DTYPE)
        self.output = Output(
            {part_prefix(prefix, part): kind for part, kind in zip(SFT_PARTS, dtypes, strict=True)}
        )
        self._dtype = dtype
        self._pack_into = pack_into
        self._multiple_of = multiple_of
        self._pad_id = pad_id
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting_tokens = 0
        self._samples = self._tokens = self._trained = self._longest = 0

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        ends = np.cumsum(arrays["lengths"], dtype=np.int64)[:-1]
        ids, labels = np.split(arrays["input_ids"], ends), np.split(arrays["labels"], ends)
        self._trained += int(np.count_nonzero(arrays["labels"] != IGNORE_INDEX))
        for sample in zip(ids, labels, strict=True) if len(arrays["lengths"]) else ():
            self._samples += 1
            self._tokens += len(sample[0])
            self._waiting.append(sample)
            self._waiting_tokens += len(sample[0])
            if len(self._waiting) == PACK_WINDOW or self._waiting_tokens >= _WINDOW_TOKENS:
                self._write_window()

    def close(self) -> None:
        """Write the samples that still wait for others."""
        self._write_window()

    def counts(self) -> dict[str, Any]:
        filled = {}
        if self._pack_into:
            share = self._tokens / max(self.output.documents * self._pack_into, 1)
            filled = {"share of the packs that is filled": round(share, 4)}
        return {
            "samples": self._samples,
            "sequences": self.output.documents,
            "tokens": self._tokens,
            "trained tokens": self._trained,
            "longest sequence": self._longest,
            "type of the ids": self._dtype.name,
            **filled,
        }

    def _write_window(self) -> None:
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        if not waiting:
            return
        if self._pack_into is None:
            packs = [[sample] for sample in waiting]
        else:
            lengths = np.array([len(ids) for ids, _ in waiting])
            packs = [[waiting[i] for i in pack] for pack in best_fit(lengths, self._pack_into)]
        ids, masks, labels, lengths = [], [], [], []
        for pack in packs:
            length = sum(len(sample[0]) for sample in pack)
            padding = -length % self._multiple_of
            ids += [*(sample[0] for sample in pack), np.full(padding, self._pad_id)]
            labels += [*(sample[1] for sample in pack), np.full(padding, IGNORE_INDEX)]
            masks += [np.full(len(sample[0]), number) for number, sample in enumerate(pack, start=1)]
            masks.append(np.zeros(padding, np.int64))
            lengths.append(length + padding)
        self._longest = max(self._longest, *lengths)
        columns = zip((ids, masks, labels), (self._dtype, LABEL_DTYPE, LABEL_DTYPE), strict=True)
        self.output.add(
            *((np.concatenate(arrays).astype(kind), np.array(lengths)) for arrays, kind in columns)
        )


class PairSink:
    """Writes the chosen and the rejected sample of each pair under one number in four data sets."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        kinds = {part: dtype if part.endswith("input_ids") else LABEL_DTYPE for part in PAIR_PARTS}
        self.output = Output({part_prefix(prefix, part): kind for part, kind in kinds.items()})
        self._dtype = dtype

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        halves = ("chosen", "chosen", "rejected", "rejected")
        lengths = (arrays[f"{half}_lengths"] for half in halves)
        self.output.add(*zip((arrays[part] for part in PAIR_PARTS), lengths, strict=True))

    def close(self) -> None:
        """Nothing is held back."""

    def counts(self) -> dict[str, Any]:
        chosen, rejected = self.output.tokens(0), self.output.tokens(2)
        return {
            "pairs": self.output.documents,
            "tokens": chosen + rejected,
            "tokens of chosen": chosen,
            "tokens of rejected": rejected,
            "type of the ids": self._dtype.name,
        }
