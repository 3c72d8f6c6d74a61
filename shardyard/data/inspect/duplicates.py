"""Samples and documents that are there twice, found by hashes of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardyard.data.eval_sets import CountedSamples
from shardyard.data.indexed import IndexedReader

READ_UP_TO = 8 * 2**30
"""Bytes of tokens up to which a data set is read through for duplicates."""


@dataclass(frozen=True)
class Duplicates:
    """How many repeat an earlier one, and the first such: (number of the earlier, number of the later)."""

    count: int
    first: tuple[int, int] | None


def sample_hashes(samples: CountedSamples, first: int, count: int) -> np.ndarray:
    """A 16-byte hash of the tokens and targets of each sample, [count]."""
    chosen = (samples[number] for number in range(first, first + count))
    return _hashes((sample.input_ids.tobytes() + sample.labels.tobytes() for sample in chosen), count)


def document_hashes(reader: IndexedReader) -> np.ndarray:
    """A 16-byte hash of the tokens of each document, [D]."""
    return _hashes(map(_little, _documents(reader)), reader.num_documents)


def duplicates(hashes: np.ndarray) -> Duplicates:
    """Those whose hash an earlier one has."""
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = firsts[inverse]
    later = np.flatnonzero(earlier != np.arange(len(hashes)))
    if not len(later):
        return Duplicates(0, None)
    return Duplicates(len(later), (int(earlier[later[0]]), int(later[0])))


def _documents(reader: IndexedReader) -> Iterator[np.ndarray]:
    offsets = reader.document_offsets()
    for number in range(reader.num_documents):
        yield reader.tokens[offsets[number] : offsets[number + 1]]


def _little(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i8", copy=False).tobytes()  # the same for files of other token types


def _hashes(contents: Iterable[bytes], count: int) -> np.ndarray:
    digests = (hashlib.blake2b(content, digest_size=16).digest() for content in contents)
    return np.fromiter(digests, np.dtype("S16"), count)
