"""Reading Megatron's indexed data set by memory map; damage is found when it is opened.

Legend: S sequences, D documents (of one sequence each, unless their text was split into sentences).
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed.layout import (
    CHUNK,
    DTYPE_OF_CODE,
    FLOAT_CODES,
    HEADER,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    VERSION,
    bin_path,
    idx_path,
)
from shardyard.errors import UserError


class IndexedReader:
    """The data set ``<prefix>.bin`` and ``<prefix>.idx``, from any writer; arrays are views of mapped files.

    Sending one to another process sends its path only. A set without a token cannot be trained on and is
    refused, unless ``allow_empty``.

    Raises:
        UserError: a file is missing, damaged or of another kind; the message names the file.
    """

    sequence_lengths: np.ndarray
    """Tokens of each sequence, int32 [S]."""
    document_indices: np.ndarray
    """The first sequence of each document, then S; int64 [D + 1]."""
    modes: np.ndarray | None
    """Mode of each sequence, int8 [S]; None in a set of text alone."""
    dtype: np.dtype
    """Type of the token ids."""

    def __init__(self, prefix: Path | str, *, allow_empty: bool = False) -> None:
        self.prefix = Path(prefix)
        self._allow_empty = allow_empty
        self._idx, self._bin = idx_path(self.prefix), bin_path(self.prefix)
        self._open_index(_mapped(self._idx, partner=self._bin))
        data = _mapped(self._bin, partner=self._idx)
        self._num_tokens = self._check_pointers(bin_size=len(data))
        self._check_documents()
        self.tokens: np.ndarray = np.frombuffer(data, self.dtype)
        """All token ids end to end, in the type of the file."""
        if not (self._num_tokens or allow_empty):
            raise UserError(
                f"{self._bin} holds no token ({len(self)} sequences, {self.num_documents} documents); see "
                "what was dropped when it was made"
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.prefix, self._allow_empty)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def sequence(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens ``offset`` to ``offset + length`` (by default: to its end) of one sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(f"tokens {offset} to {offset + length} of a sequence of {available}")
        begin = int(self._pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[begin : begin + length]

    def document(self, index: int) -> np.ndarray:
        """All tokens of one document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        begin, end = self.document_offsets(index, index + 1)
        return self.tokens[begin:end]

    def document_offsets(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Where documents ``first`` to ``last - 1`` begin in ``tokens``, and where the last one ends.

        int64 [last - first + 1]; ``last`` is by default the number of documents.
        """
        last = self.num_documents if last is None else last
        return self.sequence_offsets(self.document_indices[first : last + 1])

    def sequence_offsets(self, sequences: np.ndarray) -> np.ndarray:
        """Where these sequences begin in ``tokens``; for S, where all of them end."""
        inside = sequences < len(self)
        offsets = np.full(len(sequences), self._num_tokens, np.int64)
        offsets[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return offsets

    def largest_id(self) -> int:
        """The largest token id, -1 of an empty set. Reads the whole of ``.bin``, a piece at a time.

        Raises:
            UserError: an id is negative.
        """
        largest = -1
        for begin in range(0, self._num_tokens, CHUNK):
            piece = self.tokens[begin : begin + CHUNK]
            if int(piece.min()) < 0:
                place = begin + int(np.argmax(piece < 0))
                raise UserError(
                    f"{self._bin} holds {self.tokens[place]} as token {place}, which is no token id"
                )
            largest = max(largest, int(piece.max()))
        return largest

    def check_ids(self, vocab_size: int) -> None:
        """Refuse ids that the model has no embedding for.

        Raises:
            UserError: an id is negative, or ``vocab_size`` or more.
        """
        if (largest := self.largest_id()) >= vocab_size:
            raise UserError(
                f"{self._bin} holds the token id {largest}, but the model's vocabulary ends at "
                f"{vocab_size - 1}; preprocess the text with this model's tokenizer"
            )

    def _open_index(self, buffer: mmap.mmap | bytes) -> None:
        if len(buffer) < HEADER.size:
            raise self._damaged(f"{len(buffer)} bytes are less than its header of {HEADER.size}")
        magic, version, code, num_sequences, num_indices = HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise UserError(
                f"{self._idx} is no index of Megatron's format: it begins with {magic!r}, not {MAGIC!r}"
            )
        if version != VERSION:
            raise UserError(f"{self._idx} is of version {version}; only version {VERSION} is known")
        if code in FLOAT_CODES:
            raise UserError(f"{self._idx} describes {FLOAT_CODES[code]} values; token ids are whole numbers")
        if code not in DTYPE_OF_CODE:
            raise self._damaged(f"{code} is no code of a type (known: {sorted(DTYPE_OF_CODE)})")
        self.dtype = DTYPE_OF_CODE[code]
        lengths = HEADER.size
        pointers = lengths + LENGTH.itemsize * num_sequences
        documents = pointers + OFFSET.itemsize * num_sequences
        modes = documents + OFFSET.itemsize * num_indices
        if len(buffer) not in (modes, modes + num_sequences):
            raise self._damaged(
                f"{num_sequences} sequences and {num_indices} document indices need {modes} bytes "
                f"({modes + num_sequences} with modes), it has {len(buffer)}"
            )
        self.sequence_lengths = np.frombuffer(buffer, LENGTH, num_sequences, lengths)
        self._pointers = np.frombuffer(buffer, OFFSET, num_sequences, pointers)
        self.document_indices = np.frombuffer(buffer, OFFSET, num_indices, documents)
        has_modes = len(buffer) > modes
        self.modes = np.frombuffer(buffer, MODE, num_sequences, modes) if has_modes else None

    def _check_pointers(self, *, bin_size: int) -> int:
        """Each sequence begins where the one before it ends, the last one ends the file; gives the tokens."""
        position = 0
        for begin in range(0, len(self), CHUNK):
            lengths = self.sequence_lengths[begin : begin + CHUNK].astype(np.int64)
            if int(lengths.min()) < 0:
                place = int(np.argmax(lengths < 0))
                raise self._damaged(f"sequence {begin + place} has a length of {lengths[place]}")
            ends = position + np.cumsum(lengths) * self.dtype.itemsize
            pointers = self._pointers[begin : begin + CHUNK]
            expected = ends - lengths * self.dtype.itemsize
            if not np.array_equal(pointers, expected):
                place = int(np.argmax(pointers != expected))
                raise self._damaged(
                    f"sequence {begin + place} is said to begin at byte {pointers[place]} of "
                    f"{self._bin.name}, but those before it end at {expected[place]}"
                )
            position = int(ends[-1])
        if position != bin_size:
            raise UserError(
                f"{self._bin} is damaged or belongs to another index: {self._idx.name} describes {position} "
                f"bytes ({position // self.dtype.itemsize} tokens of {self.dtype.itemsize}), it has "
                f"{bin_size}; copy both again or preprocess their source again"
            )
        return position // self.dtype.itemsize

    def _check_documents(self) -> None:
        indices = self.document_indices
        if not len(indices) or indices[0] != 0:
            raise self._damaged("its document index does not begin with sequence 0")
        if indices[-1] != len(self):
            raise self._damaged(f"its document index ends at sequence {indices[-1]} of {len(self)}")
        for begin in range(0, len(indices), CHUNK):
            piece = indices[begin : begin + CHUNK + 1]  # one more: the step to the next piece
            if not (piece[1:] >= piece[:-1]).all():
                place = int(np.argmax(piece[1:] < piece[:-1]))
                raise self._damaged(
                    f"document {begin + place} begins at sequence {piece[place]}, the next one at "
                    f"{piece[place + 1]}"
                )

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._idx} is damaged: {what}; copy it again or preprocess its source again")


def _reopened(prefix: Path, allow_empty: bool) -> IndexedReader:
    return IndexedReader(prefix, allow_empty=allow_empty)


def _mapped(path: Path, *, partner: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # an empty file cannot be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        found = f"{partner.name} is there" if partner.is_file() else f"nor is {partner.name}"
        raise UserError(
            f"{path} is missing ({found}); a data set is named by its path without .bin and .idx"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
