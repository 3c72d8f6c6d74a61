"""Writing Megatron's indexed data set: complete under its name, or absent."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardyard.data.indexed.layout import (
    CHUNK,
    CODE_OF_DTYPE,
    HEADER,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    VERSION,
    bin_path,
    idx_path,
)
from shardyard.durable import flush, remove_leftovers, sync, temporary_name
from shardyard.errors import UserError


class IndexedWriter:
    """Appends documents to ``<prefix>.bin`` and writes ``<prefix>.idx`` in ``finish``.

    Use as a context manager: both files are written under temporary names beside the prefix, and leaving
    without ``finish`` removes them. Those that a killed process left behind are removed by the next writer of
    the same prefix on the same machine. Memory holds 4 bytes for each sequence and each document, no tokens.

    ``with_modes`` makes a multimodal set, one mode byte a sequence.

    Raises:
        UserError: the files cannot be written, or a token id or length does not fit.
    """

    def __init__(self, prefix: Path | str, dtype: Any, *, with_modes: bool = False) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"{self.dtype} is no type of token ids")
        self.num_tokens = 0
        self._lengths = array("i")
        self._sequence_counts = array("i")
        self._modes = bytearray() if with_modes else None
        temporary = temporary_name(self.prefix)
        self._temporary = (bin_path(temporary), idx_path(temporary))
        with _file_errors(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.prefix)
            self._file: BinaryIO = self._temporary[0].open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        for path in self._temporary:
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def num_documents(self) -> int:
        return len(self._sequence_counts)

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    def add_document(self, tokens: Sequence[int] | np.ndarray | Sequence[Sequence[int] | np.ndarray]) -> None:
        """Append one document: its token ids, or those of each of its sequences."""
        several = not isinstance(tokens, np.ndarray) and len(tokens) and not np.isscalar(tokens[0])
        sequences = [np.asarray(part, np.int64) for part in (tokens if several else [tokens])]
        lengths = np.array([len(part) for part in sequences], np.int64)
        self.append(np.concatenate(sequences), lengths, np.array([len(sequences)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of one sequence each: their ids end to end, and how many each one has."""
        self.append(tokens, lengths, np.ones(len(lengths), np.int64))

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sequence_counts: np.ndarray,
        modes: np.ndarray | None = None,
    ) -> None:
        """Append documents of several sequences each, as flat arrays.

        ``tokens`` [T] are the ids of all of them, ``lengths`` [S] the tokens of each sequence (sum T),
        ``sequence_counts`` the sequences of each document (sum S), ``modes`` [S] those of a multimodal set.
        """
        if int(lengths.sum()) != len(tokens) or int(sequence_counts.sum()) != len(lengths):
            raise ValueError("tokens, lengths and sequence counts do not fit together")
        if (modes is None) != (self._modes is None) or (modes is not None and len(modes) != len(lengths)):
            raise ValueError("a set has a mode for each sequence, or none at all")
        if len(lengths) and int(lengths.max()) > np.iinfo(LENGTH).max:
            raise UserError(
                f"{self.prefix}: a document of {lengths.max()} tokens does not fit the format, whose longest "
                f"is {np.iinfo(LENGTH).max}; split it"
            )
        with _file_errors(self.prefix):
            self._file.write(self._in_dtype(tokens).data)
        self.num_tokens += len(tokens)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._sequence_counts.frombytes(sequence_counts.astype(np.intc).tobytes())
        if self._modes is not None and modes is not None:
            self._modes += modes.astype(MODE).tobytes()

    def finish(self) -> None:
        """Make both files durable and give them their names, the index last."""
        with _file_errors(self.prefix):
            flush(self._file)
            self._file.close()
            with self._temporary[1].open("wb") as file:
                self._write_index(file)
                flush(file)
            # Without an index there is no data set: an older one goes first, the new one comes last.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary[0].replace(bin_path(self.prefix))
            self._temporary[1].replace(idx_path(self.prefix))
            sync(self.prefix.parent)

    def _in_dtype(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.dtype != self.dtype and len(tokens):
            limits, smallest, largest = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
            if smallest < limits.min or largest > limits.max:
                wrong = smallest if smallest < limits.min else largest
                raise UserError(f"{self.prefix}: the token id {wrong} does not fit {self.dtype.name}")
        return np.ascontiguousarray(tokens, self.dtype)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.intc)
        counts = np.frombuffer(self._sequence_counts, np.intc)
        header = HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(lengths), len(counts) + 1)
        file.write(header)
        for begin in range(0, len(lengths), CHUNK):
            file.write(lengths[begin : begin + CHUNK].astype(LENGTH).tobytes())
        for ends in _running_sums(lengths):
            starts = ends[:-1] * self.dtype.itemsize
            file.write(starts.astype(OFFSET).tobytes())
        file.write(np.zeros(1, OFFSET).tobytes())
        for ends in _running_sums(counts):
            file.write(ends[1:].astype(OFFSET).tobytes())
        if self._modes is not None:
            file.write(self._modes)


def _running_sums(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """The sum before each number and after the last, int64, a piece of n + 1 sums at a time."""
    total = 0
    for begin in range(0, len(numbers), CHUNK):
        sums = np.cumsum(np.append(total, numbers[begin : begin + CHUNK].astype(np.int64)))
        total = int(sums[-1])
        yield sums


@contextlib.contextmanager
def _file_errors(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {bin_path(prefix)} and its index: {error.strerror or error}; free space there, or "
            "name a folder that can be written"
        ) from error
