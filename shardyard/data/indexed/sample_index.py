"""The pretraining samples of an indexed data set: windows over its documents, in an order of the seed's.

Legend: D documents of the split, T tokens in them, c ``cutoff_len``, N samples.

The documents, in that order, are one stream t of T tokens. Window k reads t[k c : k c + c] and predicts
t[k c + 1 : k c + c + 1]; the last one is as short as the stream leaves it, so N = ceil((T - 1) / c) and every
token but the first is a target exactly once. Which window is trained when is the sampler's business, anew
each epoch; the stream itself stays as it is.

With ``reset_attention_mask`` each document inside a window is an attention segment with positions from 0 on,
and its last token, whose target would be the next document's first, has no label. A document that goes on in
the next window is two segments: its second part does not see the first one and counts from 0 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed.format import IndexedReader
from shardyard.data.types import IGNORE_INDEX, Sample

_ORDER_STREAM = 0x646F6373
"""Keeps the order of documents apart from what else the same seed decides ("docs" in ASCII)."""


def document_order(num_documents: int, seed: int, stream: int = 0) -> np.ndarray:
    """A permutation of the documents that depends on seed and stream only, int64 [D].

    ``stream`` tells data sets with the same seed apart. Made of raw generator words for the reason that
    ``sampler.epoch_order`` gives: it must outlive an upgrade of numpy.
    """
    words = np.random.Philox(np.random.SeedSequence([seed % 2**64, _ORDER_STREAM, stream]))
    return np.argsort(words.random_raw(num_documents), kind="stable").astype(np.int64, copy=False)


class TokenStream:
    """Pieces of a set's token array, end to end in some order; read at any place.

    ``starts`` int64 [P] is where each piece begins in ``tokens``, ``lengths`` [P] how long it is (0 is well).
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._tokens = tokens
        self._starts = starts
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [begin, end) of the stream, int32, and where pieces end among them, int64 and ascending.

        An end is the number of tokens read up to and with a piece's last one. ``begin`` < ``end``.
        """
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end - 1, side="right"))
        ends = self._ends[first : last + 1]
        # What leads from a place in the stream to one in .bin, for each piece. Empty pieces read nothing.
        shifts = self._starts[first : last + 1] - np.append(self._ends[first - 1] if first else 0, ends[:-1])
        bounds = np.append(begin, np.minimum(ends, end))
        places = zip(bounds[:-1].tolist(), bounds[1:].tolist(), shifts.tolist(), strict=True)
        parts = [self._tokens[low + shift : high + shift] for low, high, shift in places]
        return np.concatenate(parts).astype(np.int32, copy=False), np.unique(ends[ends <= end] - begin)

    def ends(self, begin: int, end: int) -> np.ndarray:
        """Where pieces end among the tokens [begin, end), as `read` gives them, without reading them."""
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="right"))
        return np.unique(self._ends[first:last] - begin)


def window_sample(
    text: np.ndarray, document_ends: np.ndarray, *, reset_attention_mask: bool, ignore_ends: bool
) -> Sample:
    """The sample of one window: n + 1 tokens of the stream make n inputs and their n targets.

    ``document_ends`` are as ``TokenStream.read`` gives them. ``reset_attention_mask`` makes each document a
    segment, ``ignore_ends`` takes the label of its last token away.
    """
    input_ids, labels = text[:-1], text[1:].copy()
    ends = document_ends[document_ends <= len(input_ids)]
    if ignore_ends:
        labels[ends - 1] = IGNORE_INDEX
    if not reset_attention_mask:
        return Sample(input_ids, labels, (len(input_ids),))
    return Sample(input_ids, labels, segments(ends, len(input_ids)))


def segments(ends: np.ndarray, length: int) -> tuple[int, ...]:
    """The lengths of the parts of ``length`` tokens that ``ends`` (ascending, from 1) part."""
    if not len(ends) or ends[-1] < length:
        ends = np.append(ends, length)
    return tuple(np.diff(ends, prepend=0).tolist())


class WindowSamples:
    """The windows over documents ``first`` to ``last - 1`` of the set at ``prefix``.

    ``seed`` None keeps the documents in the order of the set. Sample i is the same in every process; sending
    this to another process sends its arguments, and the index is built anew there.

    Raises:
        UserError: the set is missing or damaged.
    """

    def __init__(
        self,
        prefix: Path,
        cutoff_len: int,
        *,
        seed: int | None,
        reset_attention_mask: bool,
        first: int = 0,
        last: int | None = None,
        stream: int = 0,
    ) -> None:
        if cutoff_len < 1:
            raise ValueError(f"cutoff_len is {cutoff_len}; it must be at least 1")
        self.reader = IndexedReader(prefix)
        last = self.reader.num_documents if last is None else last
        if not 0 <= first <= last <= self.reader.num_documents:
            raise ValueError(f"documents {first} to {last} of {self.reader.num_documents}")
        self._arguments = (prefix, cutoff_len, seed, reset_attention_mask, first, last, stream)
        self._cutoff_len = cutoff_len
        self._reset = reset_attention_mask
        offsets = self.reader.document_offsets(first, last)
        starts, lengths = offsets[:-1], np.diff(offsets)
        if seed is not None:
            order = document_order(last - first, seed, stream)
            starts, lengths = starts[order], lengths[order]
        self._stream = TokenStream(self.reader.tokens, starts, lengths)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the documents."""
        return len(self._stream)

    def __len__(self) -> int:
        return max(-(-(self.num_tokens - 1) // self._cutoff_len), 0)

    def __getitem__(self, index: int) -> Sample:
        text, ends = self._read(index)
        return window_sample(text, ends, reset_attention_mask=self._reset, ignore_ends=self._reset)

    def document_ends(self, index: int) -> np.ndarray:
        """Where documents end in a window: how many of its inputs there are up to each end, ascending."""
        text, ends = self._read(index)
        return ends[ends < len(text)]

    def doc_lens(self, index: int) -> Sequence[int]:
        """The documents of a window, without reading its tokens."""
        begin, end = self._bounds(index)
        if not self._reset:
            return (end - begin - 1,)
        return segments(self._stream.ends(begin, end - 1), end - begin - 1)

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._stream.read(*self._bounds(index))

    def _bounds(self, index: int) -> tuple[int, int]:
        """Where a window's tokens, inputs and the last target, begin and end in the stream."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin = index * self._cutoff_len
        return begin, min(begin + self._cutoff_len + 1, self.num_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._arguments


def _rebuilt(
    prefix: Path, cutoff_len: int, seed: int | None, reset: bool, first: int, last: int, stream: int
) -> WindowSamples:
    return WindowSamples(
        prefix, cutoff_len, seed=seed, reset_attention_mask=reset, first=first, last=last, stream=stream
    )
