"""Raw text to pretraining samples: one token stream over all documents, cut into windows that overlap by one
token.

Window k of a stream t reads t[k c : k c + c] and predicts t[k c + 1 : k c + c + 1], c being
``data.cutoff_len``; the last one is as short as the stream leaves it. So every token but the stream's first
is a target exactly once. Positions run through a window and attention is causal across documents, as
Megatron's are. With ``reset_attention_mask`` each document is an attention segment with positions of its own,
and its last token, whose target is the next document's, is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardyard.data.store import SampleBlock
from shardyard.data.types import IGNORE_INDEX
from shardyard.errors import UserError

EMPTY_DOCUMENT = "empty document"
INVALID_UNICODE = "text that is not valid Unicode (half of a surrogate pair)"


@dataclass(frozen=True)
class Documents:
    """Tokenised documents end to end.

    ``tokens`` int32 [T]; ``lengths`` int32, of each document; ``dropped`` (reason, where) of those left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: int
    dropped: Sequence[tuple[str, str]]


class DocumentTokenizer:
    """Tokenises a batch of (text, where); runs in a tokenising process.

    A document gets the tokenizer's own special tokens, and with ``append_eod`` the end-of-document token (the
    tokenizer's eos) at its end, once. One without any text or token is dropped, and one that is not Unicode.

    Raises:
        UserError: ``append_eod`` with a tokenizer that has no eos token.
    """

    def __init__(self, tokenizer: Any, *, append_eod: bool, split_special_tokens: bool) -> None:
        if append_eod and tokenizer.eos_token_id is None:
            raise UserError(
                "data.append_eod: the tokenizer has no eos token to end a document with; set "
                "data.append_eod to false"
            )
        self._tokenizer = tokenizer
        self._eod = tokenizer.eos_token_id if append_eod else None
        self._options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        if split_special_tokens:
            self._options["split_special_tokens"] = True

    def __call__(self, batch: Sequence[tuple[str, str]]) -> Documents:
        faults = [_fault(text) for text, _ in batch]
        kept = [(text, where) for (text, where), fault in zip(batch, faults, strict=True) if fault is None]
        dropped = [
            (fault, where) for (_, where), fault in zip(batch, faults, strict=True) if fault is not None
        ]
        texts = [text for text, _ in kept]
        ids = self._tokenizer(texts, **self._options)["input_ids"] if texts else []
        dropped += [
            (EMPTY_DOCUMENT, where) for (_, where), doc in zip(kept, ids, strict=True) if not len(doc)
        ]
        ids = [doc for doc in ids if len(doc)]
        if self._eod is not None:
            ids = [doc if doc[-1] == self._eod else [*doc, self._eod] for doc in ids]
        return Documents(
            tokens=np.array([token for doc in ids for token in doc], np.int32),
            lengths=np.array([len(doc) for doc in ids], np.int32),
            rows=len(batch),
            dropped=dropped,
        )


def _fault(text: str) -> str | None:
    """Why a text is no document; None if it is one."""
    if not text.strip():
        return EMPTY_DOCUMENT
    try:
        text.encode()
    except UnicodeEncodeError:
        return INVALID_UNICODE
    return None


class Windows:
    """Cuts the stream as it comes; holds less than a window between two calls."""

    def __init__(self, cutoff_len: int, *, reset_attention_mask: bool) -> None:
        self._length = cutoff_len
        self._reset = reset_attention_mask
        self._tokens = np.empty(0, np.int32)
        self._ends = np.empty(0, bool)
        """Whether a token is its document's last."""

    def push(self, documents: Documents) -> SampleBlock:
        """Append documents to the stream and return the windows that are now complete."""
        ends = np.zeros(len(documents.tokens), bool)
        ends[np.cumsum(documents.lengths[documents.lengths > 0], dtype=np.int64) - 1] = True
        self._tokens = np.concatenate([self._tokens, documents.tokens])
        self._ends = np.concatenate([self._ends, ends])
        return self._cut((len(self._tokens) - 1) // self._length * self._length)

    def flush(self) -> SampleBlock:
        """The last, partial window; nothing if fewer than two tokens are left."""
        return self._cut(len(self._tokens) - 1)

    def _cut(self, num_inputs: int) -> SampleBlock:
        if num_inputs <= 0:
            return SampleBlock.of([])
        input_ids, labels = self._tokens[:num_inputs], self._tokens[1 : num_inputs + 1].copy()
        window_ends = np.append(np.arange(self._length, num_inputs, self._length), num_inputs)
        segment_ends = window_ends
        if self._reset:
            labels[self._ends[:num_inputs]] = IGNORE_INDEX
            segment_ends = np.union1d(window_ends, np.flatnonzero(self._ends[:num_inputs]) + 1)
        windows_closed = np.searchsorted(segment_ends, window_ends, side="right")
        block = SampleBlock(
            input_ids=input_ids,
            labels=labels,
            lengths=np.diff(window_ends, prepend=0).astype(np.int32),
            doc_lens=np.diff(segment_ends, prepend=0).astype(np.int32),
            doc_counts=np.diff(windows_closed, prepend=0).astype(np.int32),
        )
        self._tokens, self._ends = self._tokens[num_inputs:], self._ends[num_inputs:]
        return block
