"""One preprocessing from its options to its outputs: found finished, gone on with, or done."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardyard.data.encode import Encoder
from shardyard.data.indexed import dtype_for
from shardyard.data.key import template_content
from shardyard.data.preprocess import manifest
from shardyard.data.preprocess.batches import Batch, Input
from shardyard.data.preprocess.conversations import ConversationDocumentWork, ConversationWork, PairWork
from shardyard.data.preprocess.outcome import Outcome, report
from shardyard.data.preprocess.run import Pace, Sink, require_rows, run_batches
from shardyard.data.preprocess.sinks import (
    PAIR_PARTS,
    SFT_PARTS,
    DocumentSink,
    PackedSink,
    PairSink,
    files_of,
    part_prefix,
)
from shardyard.data.preprocess.spool import SAVE_EVERY, Busy, Spool, file_errors, write_json
from shardyard.data.preprocess.texts import DocumentWork, end_of_document
from shardyard.data.sources import DatasetEntry
from shardyard.data.sources.readers import Policy
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")

Kind = Literal["text", "document", "sft", "pairs"]
"""Texts, or conversations as text, for pretraining; samples for fine-tuning; preference pairs."""

_WHOLE = 2**31 - 1
"""The cut-off of conversations that are not to be cut."""


@dataclass(frozen=True)
class Job:
    """What to make. The fields down to ``on_bad_row`` decide the bytes, the others how they are made."""

    kind: Kind
    entries: Sequence[DatasetEntry]
    prefix: Path
    json_keys: tuple[str, ...] = ("text",)
    """Of ``text``: the columns, each an output of its own."""
    append_eod: bool = False
    template: str | None = None
    enable_thinking: bool | None = True
    seq_length: int | None = None
    pack: bool = False
    pad_to_multiple_of: int = 1
    max_samples: int | None = None
    on_bad_row: Policy = "stop"
    pace: Pace = field(default_factory=Pace)
    save_every: float = SAVE_EVERY
    overwrite: bool = False
    memo: Path = manifest.MEMO

    def options(self) -> dict[str, Any]:
        """What the bytes depend on beside the input and the tokenizer, as plain values."""
        names = (
            "kind", "json_keys", "append_eod", "template", "enable_thinking", "seq_length", "pack",
            "pad_to_multiple_of", "max_samples", "on_bad_row",
        )  # fmt: skip
        options = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        content = template_content(self.template)
        if content is not None:
            options["the template's content"] = content
        return options


@dataclass(frozen=True)
class _Part:
    """One output of a job: how it is read, made and kept."""

    name: str
    source: Input
    work: Callable[[Batch], Outcome]
    make_sink: Callable[[], Sink]


@dataclass(frozen=True)
class Result:
    """What a job has done: the data sets by their prefixes, and the counts of each part."""

    prefixes: list[Path]
    counts: dict[str, dict[str, Any]]
    already_there: bool = False


def run_job(job: Job, tokenizer: Any) -> Result:
    """Do the job, unless its outputs are there already.

    Finished work is kept in ``<prefix>.partial`` until the outputs are complete, and taken up by the next run
    with the same options, tokenizer and input. A mistake of the user leaves nothing behind; a killed or
    interrupted run leaves that folder.

    Raises:
        UserError: a fault of the input or options, other outputs in the way, files that cannot be written.
    """
    key = manifest.describe(job.entries, tokenizer, job.options(), job.memo)
    parts = _parts(job, tokenizer)
    prefixes = [prefix for part in parts for prefix in _outputs_of(job, part)]
    was_killed = _was_killed_while_naming(job.prefix, key)
    if not (job.overwrite or was_killed) and manifest.is_there(job.prefix, key, files_of(prefixes)):
        return Result(prefixes, manifest.counts_of(job.prefix), already_there=True)
    named = list(prefixes) if was_killed else []
    with _nothing_left_behind(job.prefix, named), contextlib.ExitStack() as spools:
        counts: dict[str, dict[str, Any]] = {}
        for part in parts:
            folder = _partial_folder(job.prefix) / part.name
            spool = spools.enter_context(contextlib.closing(Spool(folder, key, save_every=job.save_every)))
            counts[part.name] = _run_part(job, part, spool, key, named)
        with file_errors(job.prefix):
            manifest.write_manifest(job.prefix, key, files_of(prefixes), counts)
    shutil.rmtree(_partial_folder(job.prefix), ignore_errors=True)
    return Result(prefixes, counts)


def _run_part(job: Job, part: _Part, spool: Spool, key: dict[str, Any], named: list[Path]) -> dict[str, Any]:
    """Make a part's outputs; ``named`` gets their prefixes when they are about to get their names."""
    began = time.monotonic()
    if spool.taken_over:
        logger.info("%s", spool.taken_over)
    sink = part.make_sink()
    with sink.output:
        tally = run_batches(part.source, part.work, sink, job.pace, spool)
        require_rows(part.source, tally, sink.output.documents)
        with file_errors(job.prefix):
            write_json(_naming(job.prefix), key)
            manifest.manifest_path(job.prefix).unlink(missing_ok=True)  # it tells of older outputs
        named += sink.output.prefixes
        sink.output.finish()
    return report(tally, sink.counts(), time.monotonic() - began)


def _parts(job: Job, tokenizer: Any) -> list[_Part]:
    source = Input(job.entries, job.kind == "text", job.max_samples, job.on_bad_row)
    dtype = dtype_for(len(tokenizer))
    if job.kind == "text":
        return [_text_part(job, replace_column(source, key), key, tokenizer) for key in job.json_keys]
    # before the encoder: a template may make its terminator the tokenizer's eos token
    eod = end_of_document(tokenizer) if job.append_eod else None
    encoder = Encoder(
        tokenizer,
        template=job.template,
        cutoff_len=_WHOLE if job.seq_length is None else job.seq_length,
        mask_history=job.kind == "pairs",
        enable_thinking=job.enable_thinking,
        write_stops=job.kind != "document",
    )
    if job.kind == "document":
        work = ConversationDocumentWork(source, encoder, dtype, eod)
        return [_Part("text", source, work, lambda: DocumentSink(_document_prefix(job, "text"), dtype))]
    if job.kind == "pairs":
        return [_Part("pairs", source, PairWork(source, encoder), lambda: PairSink(job.prefix, dtype))]

    def packed_sink() -> PackedSink:
        return PackedSink(
            job.prefix,
            dtype,
            pack_into=job.seq_length if job.pack else None,
            multiple_of=job.pad_to_multiple_of,
            pad_id=_pad_id(tokenizer),
        )

    return [_Part("packed", source, ConversationWork(source, encoder), packed_sink)]


def _text_part(job: Job, source: Input, key: str, tokenizer: Any) -> _Part:
    work = DocumentWork(source, tokenizer, append_eod=job.append_eod)
    return _Part(key, source, work, lambda: DocumentSink(_document_prefix(job, key), work.dtype))


def replace_column(source: Input, column: str) -> Input:
    """The same input whose documents are in ``column``; lines of txt files have none."""

    def named(entry: DatasetEntry) -> DatasetEntry:
        return replace(entry, columns=replace(entry.columns, text=column), named_columns=("text",))

    return replace(source, entries=[named(entry) for entry in source.entries])


def _outputs_of(job: Job, part: _Part) -> list[Path]:
    if job.kind in ("text", "document"):
        return [_document_prefix(job, part.name)]
    return [part_prefix(job.prefix, name) for name in (PAIR_PARTS if job.kind == "pairs" else SFT_PARTS)]


def _document_prefix(job: Job, key: str) -> Path:
    return job.prefix.with_name(f"{job.prefix.name}_{key}_document")


def _partial_folder(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.partial")


def _naming(prefix: Path) -> Path:
    """Written when the first output is about to get its name: from then on, until there is a manifest, what
    stands under these names is this job's own."""
    return _partial_folder(prefix) / "naming.json"


def _was_killed_while_naming(prefix: Path, key: dict[str, Any]) -> bool:
    """Whether a run of this very key ended between its first output and the manifest."""
    if manifest.manifest_path(prefix).exists():
        return False
    try:
        return json.loads(_naming(prefix).read_text(encoding="utf-8")) == key
    except (OSError, ValueError):
        return False


def _pad_id(tokenizer: Any) -> int:
    """Padding is never trained nor attended to, so any id will do; the tokenizer's own reads best."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in ids if token is not None))


@contextlib.contextmanager
def _nothing_left_behind(prefix: Path, named: list[Path]) -> Iterator[None]:
    """Remove unfinished work, the outputs in ``named``, and the folders that were made for them, when the
    user's mistake (or a full disk) ends the job.
    """
    missing = [folder for folder in prefix.parents if not folder.exists()]
    try:
        yield
    except UserError as error:
        if not isinstance(error, Busy):
            own = [*files_of(named), manifest.manifest_path(prefix)] if named else []
            for path in own:
                with contextlib.suppress(OSError):
                    path.unlink()
            shutil.rmtree(_partial_folder(prefix), ignore_errors=True)
            for folder in missing:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise
