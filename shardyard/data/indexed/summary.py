"""What an indexed data set holds, for a person (text) and for a program (JSON)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed.format import IndexedReader

_BAR = 40
"""Characters of the longest bar of the histogram."""


@dataclass(frozen=True)
class LengthBucket:
    """Documents of ``shortest`` to ``longest`` tokens, both included."""

    shortest: int
    longest: int
    documents: int


@dataclass(frozen=True)
class DocumentHead:
    """The first tokens of a document of ``length`` tokens; ``text`` where a decoder was given."""

    index: int
    length: int
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class Summary:
    """Counts of one set; lengths are those of documents, in tokens."""

    prefix: str
    dtype: str
    multimodal: bool
    documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    median: float
    mean: float
    histogram: tuple[LengthBucket, ...]
    """Buckets for 0, 1, 2 to 3, 4 to 7 ... tokens, from the first to the last that holds a document."""
    last_id: int | None
    """The id that most documents end with: that of the end-of-document token, if one was appended."""
    documents_ending_so: int
    heads: tuple[DocumentHead, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def to_text(self) -> str:
        """Several lines for a terminal."""
        kind = ", multimodal" if self.multimodal else ""
        lines = [
            f"{self.prefix} ({self.dtype}{kind})",
            f"  documents {self.documents:,}   sequences {self.sequences:,}   tokens {self.tokens:,}",
            f"  tokens a document: {self.shortest:,} to {self.longest:,}, median {self.median:,.1f}, "
            f"mean {self.mean:,.1f}",
        ]
        if self.last_id is not None:
            lines.append(f"  {self.documents_ending_so:,} documents end with the id {self.last_id}")
        largest = max((bucket.documents for bucket in self.histogram), default=0)
        for bucket in self.histogram:
            bar = "#" * -(-bucket.documents * _BAR // largest)
            span = f"{bucket.shortest:,}-{bucket.longest:,}"
            lines.append(f"  {span:>23} {bucket.documents:>13,} {bar}".rstrip())
        for head in self.heads:
            more = " ..." if head.length > len(head.ids) else ""
            what = repr(head.text) if head.text is not None else " ".join(map(str, head.ids))
            lines.append(f"  document {head.index} ({head.length:,} tokens): {what}{more}")
        return "\n".join(lines)


def inspect(
    prefix: Path,
    decode: Callable[[list[int]], str] | None = None,
    *,
    num_heads: int = 3,
    head_tokens: int = 64,
) -> Summary:
    """Open and check the set, count it, show the first ``head_tokens`` of its first ``num_heads`` documents.

    ``decode`` turns ids into text, as a tokenizer's method of that name does.

    Raises:
        UserError: the set is missing or damaged.
    """
    reader = IndexedReader(prefix, allow_empty=True)
    offsets = reader.document_offsets()
    lengths = np.diff(offsets)
    last_id, ending_so = _commonest_last_id(reader, offsets[1:][lengths > 0] - 1)
    return Summary(
        prefix=str(prefix),
        dtype=reader.dtype.name,
        multimodal=reader.modes is not None,
        documents=reader.num_documents,
        sequences=len(reader),
        tokens=reader.num_tokens,
        shortest=int(lengths.min()) if len(lengths) else 0,
        longest=int(lengths.max(initial=0)),
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        histogram=_histogram(lengths),
        last_id=last_id,
        documents_ending_so=ending_so,
        heads=tuple(
            _head(reader, index, decode, head_tokens) for index in range(min(num_heads, reader.num_documents))
        ),
    )


def _histogram(lengths: np.ndarray) -> tuple[LengthBucket, ...]:
    if not len(lengths):
        return ()
    first_of_bucket = np.concatenate([[0], 1 << np.arange(62, dtype=np.int64)])
    counts = np.bincount(np.searchsorted(first_of_bucket, lengths, side="right") - 1)
    filled = np.flatnonzero(counts)
    return tuple(
        LengthBucket(int(first_of_bucket[b]), int(first_of_bucket[b + 1]) - 1, int(counts[b]))
        for b in range(filled[0], filled[-1] + 1)
    )


def _commonest_last_id(reader: IndexedReader, places: np.ndarray) -> tuple[int | None, int]:
    if not len(places):
        return None, 0
    ids, counts = np.unique(reader.tokens[places], return_counts=True)
    commonest = int(np.argmax(counts))
    return int(ids[commonest]), int(counts[commonest])


def _head(
    reader: IndexedReader, index: int, decode: Callable[[list[int]], str] | None, head_tokens: int
) -> DocumentHead:
    document = reader.document(index)
    ids = document[:head_tokens].tolist()
    return DocumentHead(index, len(document), tuple(ids), decode(ids) if decode is not None else None)
