"""Text for pretraining -> Megatron's indexed data set."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed import IndexedWriter
from shardyard.data.preprocess.batches import Input
from shardyard.data.preprocess.outcome import Tally
from shardyard.data.preprocess.run import Pace, run_batches
from shardyard.data.preprocess.spool import Spool
from shardyard.data.preprocess.texts import DocumentWork
from shardyard.data.sources import DatasetEntry
from shardyard.data.sources.readers import Policy
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")


@dataclass(frozen=True)
class DocumentsReport:
    """What became of the input of one output."""

    rows: int
    documents: int
    tokens: int
    dropped: dict[str, tuple[int, str]]
    """How many rows were left out for a reason, and where the first of them stands."""
    counts: dict[str, int]
    """Further counts, by the words that tell them."""
    dtype: str
    largest_id: int
    longest: int
    """Tokens of the longest document, its end token included."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The table, one line a count."""
        table = [("rows read", f"{self.rows:,}")]
        for reason, (count, first) in sorted(self.dropped.items(), key=lambda item: -item[1][0]):
            table.append((f"dropped: {reason}", f"{count:,} (first: {first})"))
        table += [(what, f"{count:,}") for what, count in self.counts.items()]
        speed = self.tokens / max(self.seconds, 1e-9)
        table += [
            ("documents", f"{self.documents:,}"),
            ("tokens", f"{self.tokens:,} as {self.dtype}, {speed:,.0f} a second"),
            ("longest document", f"{self.longest:,} tokens"),
        ]
        width = max(len(name) for name, _ in table)
        return [f"  {name:<{width}}  {value}" for name, value in table]


class DocumentSink:
    """Writes documents and keeps the extremes that a report tells."""

    def __init__(self, writer: IndexedWriter) -> None:
        self.writer = writer
        self.largest_id = -1
        self.longest = 0

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        self.largest_id = max(self.largest_id, int(tokens.max(initial=-1)) if len(tokens) else -1)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.writer.add_documents(tokens, lengths)


def write_documents(
    entry: DatasetEntry,
    tokenizer: Any,
    prefix: Path,
    *,
    append_eod: bool,
    workers: int,
    max_documents: int | None = None,
    split_special_tokens: bool = False,
    on_bad_row: Policy = "stop",
    resumable: bool = False,
) -> DocumentsReport:
    """Tokenise the texts of ``entry`` into ``<prefix>.bin`` and ``<prefix>.idx``, complete or not at all.

    A document gets the special tokens that the tokenizer adds of itself and, with ``append_eod``, its eos
    token at the end, once. Rows without text are dropped and counted. Ids are uint16 or int32, by the size of
    the vocabulary (Megatron's rule). The bytes do not depend on ``workers``; memory does not grow with the
    input. ``max_documents`` rows are read at most. ``resumable`` keeps finished work in ``<prefix>.partial``
    until the end, so that a killed run can go on.

    Raises:
        UserError: a fault of the input or the tokenizer, nothing left to write, or a file that cannot be
            written.
    """
    source = Input([entry], texts=True, max_rows=max_documents, on_bad_row=on_bad_row)
    work = DocumentWork(source, tokenizer, append_eod=append_eod, split_special_tokens=split_special_tokens)
    spool = None
    if resumable:
        from shardyard.data.preprocess.manifest import describe

        options = {"append_eod": append_eod, "max_documents": max_documents, "on_bad_row": on_bad_row}
        options["split_special_tokens"] = split_special_tokens
        parts = describe([entry], tokenizer, options)
        spool = Spool(prefix.with_name(f"{prefix.name}.partial"), parts)
    try:
        report = run_documents(source, work, prefix, Pace(workers), spool)
    except BaseException:
        if spool is not None:
            spool.close()
        raise
    if spool is not None:
        spool.remove()
    return report


def run_documents(
    source: Input, work: DocumentWork, prefix: Path, pace: Pace, spool: Spool | None
) -> DocumentsReport:
    """The same with its parts made by the caller."""
    began = time.monotonic()
    if spool is not None and spool.taken_over:
        logger.info("%s", spool.taken_over)
    with IndexedWriter(prefix, work.dtype) as writer:
        sink = DocumentSink(writer)
        tally = run_batches(source, work, sink, pace, spool)
        require_rows(source, tally, writer.num_documents)
        writer.finish()
    return DocumentsReport(
        rows=tally.rows,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        dropped={reason: (drop.count, drop.first) for reason, drop in tally.dropped.items()},
        counts=dict(tally.counts),
        dtype=work.dtype.name,
        largest_id=sink.largest_id,
        longest=sink.longest,
        seconds=time.monotonic() - began,
    )


def require_rows(source: Input, tally: Tally, written: int) -> None:
    """Raise UserError, with the counts, unless something was written."""
    if written:
        return
    names = ", ".join(entry.name for entry in source.entries)
    reasons = "; ".join(
        f"{reason}: {drop.count} (first: {drop.first})" for reason, drop in tally.dropped.items()
    )
    told = f"; {reasons}" if reasons else ""
    raise UserError(f"{names}: none of {tally.rows} rows is left to write{told}")
