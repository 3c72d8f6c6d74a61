"""Text for pretraining -> Megatron's indexed data set."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.data.preprocess.batches import Input
from shardyard.data.preprocess.manifest import describe
from shardyard.data.preprocess.run import Pace, require_rows, run_batches
from shardyard.data.preprocess.sinks import DocumentSink
from shardyard.data.preprocess.spool import Spool
from shardyard.data.preprocess.texts import DocumentWork
from shardyard.data.sources import DatasetEntry
from shardyard.data.sources.readers import Policy

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
    """Of this process: a run that took work over counts its own time alone."""
    taken_over: bool = False
    """Some of the work was done by a run before."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
        options = {"append_eod": append_eod, "max_documents": max_documents, "on_bad_row": on_bad_row}
        options["split_special_tokens"] = split_special_tokens
        parts = describe([entry], tokenizer, options)
        spool = Spool(prefix.with_name(f"{prefix.name}.partial"), parts)
        if spool.taken_over:
            logger.info("%s", spool.taken_over)
    began = time.monotonic()
    sink = DocumentSink(prefix, work.dtype)
    with contextlib.closing(spool) if spool is not None else contextlib.nullcontext(), sink.output:
        tally = run_batches(
            source, work, sink, Pace(workers, setting="data.preprocessing_num_workers"), spool
        )
        require_rows(source, tally, sink.output.documents)
        sink.output.finish()
    if spool is not None:
        spool.remove()
    return DocumentsReport(
        rows=tally.rows,
        documents=sink.output.documents,
        tokens=sink.output.tokens(),
        dropped={reason: (drop.count, drop.first) for reason, drop in tally.dropped.items()},
        counts={what: count for what, count in tally.counts.items() if count},
        dtype=work.dtype.name,
        largest_id=sink.largest_id,
        longest=sink.longest,
        seconds=time.monotonic() - began,
        taken_over=spool is not None and bool(spool.taken_over),
    )
