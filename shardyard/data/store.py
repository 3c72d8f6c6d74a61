"""Tokenised samples on disk: flat memory-mapped arrays in a folder that is complete or absent.

Legend: N samples, T tokens of all samples, D documents (attention segments) of all samples.

    input_ids.bin    int32 [T]
    labels.bin       int32 [T]
    offsets.bin      int64 [N+1]   where a sample's tokens begin
    doc_lens.bin     int32 [D]
    doc_offsets.bin  int64 [N+1]   where a sample's documents begin
    flags.bin        uint8 [N]     what was left out of a sample: ``FLAG_TRUNCATED``, ``FLAG_LOST_THOUGHT``
    rows.bin         int64 [N]     a sample's row, counted from 0 as the input is read; -1: unknown
    manifest.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardyard.data.folders import NewFolder, check_folder, file_errors
from shardyard.data.types import Sample

FORMAT = 2
"""Layout of the folder; a store of another layout is not read."""

FLAG_TRUNCATED = 1
"""Flag of a sample that was cut to ``data.cutoff_len``."""
FLAG_LOST_THOUGHT = 2
"""Flag of a sample without a thought that its row holds: the template has no place for it."""

_DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "labels.bin": np.dtype("<i4"),
    "offsets.bin": np.dtype("<i8"),
    "doc_lens.bin": np.dtype("<i4"),
    "doc_offsets.bin": np.dtype("<i8"),
    "flags.bin": np.dtype("u1"),
    "rows.bin": np.dtype("<i8"),
}


@dataclass(frozen=True)
class SampleBlock:
    """Several samples as flat arrays, int32 unless said otherwise: what tokenising processes send and the
    store appends.
    """

    input_ids: np.ndarray
    """[T of the block]"""
    labels: np.ndarray
    """[T of the block]"""
    lengths: np.ndarray
    """Tokens of each sample."""
    doc_lens: np.ndarray
    """Tokens of each document."""
    doc_counts: np.ndarray
    """Documents of each sample."""
    flags: np.ndarray | None = None
    """What was left out of each sample, uint8; None: nothing."""
    rows: np.ndarray | None = None
    """The row of each sample, int64; None: unknown."""

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        *,
        flags: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> SampleBlock:
        empty = [np.empty(0, np.int32)]
        return cls(
            input_ids=np.concatenate([*empty, *(sample.input_ids for sample in samples)], dtype=np.int32),
            labels=np.concatenate([*empty, *(sample.labels for sample in samples)], dtype=np.int32),
            lengths=np.array([len(sample.input_ids) for sample in samples], np.int32),
            doc_lens=np.array([n for sample in samples for n in sample.doc_lens], np.int32),
            doc_counts=np.array([len(sample.doc_lens) for sample in samples], np.int32),
            flags=None if flags is None else np.array(flags, np.uint8),
            rows=None if rows is None else np.array(rows, np.int64),
        )


class StoreWriter:
    """Appends blocks to a new store at ``path``; ``finish`` gives it its name (see ``NewFolder``).

    Use as a context manager. Memory does not grow with what is written.

    Raises:
        UserError: the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_samples = 0
        self._tokens = 0
        self._docs = 0
        self._folder = NewFolder(path)
        self._files: dict[str, BinaryIO] = {}
        try:
            for name in _DTYPES:
                self._files[name] = (self._folder.temporary / name).open("wb")
            self._append("offsets.bin", np.zeros(1, np.int64))
            self._append("doc_offsets.bin", np.zeros(1, np.int64))
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._discard()

    def add(self, block: SampleBlock) -> None:
        """Append the block's samples."""
        if not len(block.input_ids) == len(block.labels) == block.lengths.sum() == block.doc_lens.sum():
            raise ValueError("the arrays of a sample block do not fit together")
        count = len(block.lengths)
        flags = np.zeros(count, np.uint8) if block.flags is None else block.flags
        rows = np.full(count, -1, np.int64) if block.rows is None else block.rows
        if not len(flags) == len(rows) == count:
            raise ValueError("the flags or rows of a sample block do not fit its samples")
        with file_errors(self.path):
            self._append("flags.bin", flags)
            self._append("rows.bin", rows)
            self._append("input_ids.bin", block.input_ids)
            self._append("labels.bin", block.labels)
            self._append("doc_lens.bin", block.doc_lens)
            self._append("offsets.bin", self._tokens + np.cumsum(block.lengths, dtype=np.int64))
            self._append("doc_offsets.bin", self._docs + np.cumsum(block.doc_counts, dtype=np.int64))
        self.num_samples += count
        self._tokens += len(block.input_ids)
        self._docs += len(block.doc_lens)

    def finish(self, manifest: dict[str, Any], *, replace: bool = False) -> SampleStore:
        """Write the manifest, make all of it durable, and give the store its name.

        A finished store that another process has put there meanwhile is kept and opened instead (other ranks
        may be reading it), unless ``replace``.
        """
        counts = {"samples": self.num_samples, "tokens": self._tokens, "documents": self._docs}
        with file_errors(self.path):
            for file in self._files.values():
                file.close()
        self._folder.finish({**manifest, "format": FORMAT, "counts": counts}, replace=replace)
        return SampleStore.open(self.path)

    def _append(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.astype(_DTYPES[name], copy=False).tobytes())

    def _discard(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._folder.discard()


class SampleStore:
    """The finished store: ``store[i]`` is sample i, its arrays views into memory-mapped files.

    Sending one to another process sends its path only.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._input_ids = _mapped(path, "input_ids.bin")
        self._labels = _mapped(path, "labels.bin")
        self._offsets = _mapped(path, "offsets.bin")
        self._doc_lens = _mapped(path, "doc_lens.bin")
        self._doc_offsets = _mapped(path, "doc_offsets.bin")
        self.flags = _mapped(path, "flags.bin")
        """What was left out of each sample, uint8 [N]."""
        self.rows = _mapped(path, "rows.bin")
        """The row of each sample, int64 [N]; -1 where it is unknown."""

    @classmethod
    def open(cls, path: Path) -> SampleStore:
        """Open the store at ``path``.

        Raises:
            UserError: it is not a store, is one of another format, or a file of it has another size than
            written.
        """
        return cls(path, check_folder(path, FORMAT))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self._offsets)

    def __getitem__(self, index: int) -> Sample:
        doc_lens = self.doc_lens(index)
        tokens = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return Sample(self._input_ids[tokens], self._labels[tokens], doc_lens)

    def doc_lens(self, index: int) -> tuple[int, ...]:
        """The documents of a sample, without reading its tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        docs = slice(int(self._doc_offsets[index]), int(self._doc_offsets[index + 1]))
        return tuple(self._doc_lens[docs].tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleStore.open, (self.path,)


def _mapped(path: Path, name: str) -> np.ndarray:
    if (path / name).stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, _DTYPES[name])
    # A plain array over the map: np.memmap's own slicing costs more than reading a sample.
    return np.asarray(np.memmap(path / name, dtype=_DTYPES[name], mode="r"))
