"""What a run's leader does: each data set is found in the cache by its content, or tokenised now."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from shardyard.config import Config
from shardyard.data import key as keys
from shardyard.data import sources
from shardyard.data.encode import Encoder
from shardyard.data.finetune import FinetunePipeline
from shardyard.data.folders import NewFolder, check_folder, read_manifest
from shardyard.data.indexed import IndexedReader
from shardyard.data.indexed.layout import bin_path, idx_path
from shardyard.data.leader import Prepared, PreparedSet
from shardyard.data.pipeline import run_pipeline
from shardyard.data.preprocess import DocumentsReport, write_documents
from shardyard.data.preprocess.manifest import check_tokenizer
from shardyard.data.preprocess.packed import SFT_PARTS, PackedSamples, part_prefix
from shardyard.data.report import Dropped, Encoded, Report
from shardyard.data.sets import NamedSet, resolve_sets
from shardyard.data.sources import DatasetEntry
from shardyard.data.store import FORMAT, SampleBlock, StoreWriter
from shardyard.data.workers import default_workers
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")

_COUNTED_AT_ONCE = 1000

DOCUMENTS = "documents"
"""The name, without .bin/.idx, of the token files in a folder of tokenised documents."""


@dataclass(frozen=True)
class Preparation:
    """What preparing needs, and where results are kept."""

    config: Config
    tokenizer: Any
    local_ranks: int = 1

    @property
    def cache(self) -> Path:
        return cache_folder(self.config)

    def run(self, dataset: Any, suffix: str = "") -> Prepared:
        """Prepare the data sets that ``dataset`` names; ``suffix`` tells ``data.tokenized_path`` of several
        apart.

        Raises:
            UserError: a fault in the input or settings; a data set of which nothing would be trained.
        """
        hasher = keys.FileHasher(self.cache / "files.json")
        found = resolve_sets(self.config, dataset)
        done = [
            self._one(named, hasher, self._explicit_path(suffix, number, len(found)))
            for number, named in enumerate(found)
        ]
        return Prepared(keys.digest({"sets": [key for key, _ in done]}), tuple(one for _, one in done))

    def _explicit_path(self, suffix: str, number: int, count: int) -> Path | None:
        named = self.config.data.tokenized_path
        if named is None:
            return None
        path = Path(named + suffix).expanduser().absolute()
        return path if count == 1 else path / f"{number:03d}"

    def _one(
        self, named: NamedSet, hasher: keys.FileHasher, explicit: Path | None
    ) -> tuple[str, PreparedSet]:
        if named.prefix is not None:
            return self._there_already(named, named.prefix)
        assert named.entry is not None
        if named.entry.ranking:
            raise UserError(
                f"data.dataset: {named.name} holds preference pairs (ranking: true), and training.stage "
                f"{self.config.training.stage} trains on replies; name other data"
            )
        facts = {file: hasher.facts(file) for file in named.entry.files}
        work = _Rows if self.config.data.data_manager_type == "lf" else _Documents
        job = work(self.config, self.tokenizer, named.entry, facts, self.local_ranks)
        key = keys.digest(job.parts)
        path = explicit or self.cache / key
        if self.config.data.overwrite_cache or not _is_ready(path, key, job.parts, explicit is not None):
            if explicit is not None:
                _refuse_foreign_folder(path)
            self._build(job, path, key, named)
        report = check_folder(path, FORMAT)["report"]
        return key, PreparedSet(job.kind, named.name, str(path), report, named.weight)

    def _build(self, job: _Job, path: Path, key: str, named: NamedSet) -> None:
        last = self.cache / "last" / f"{keys.identity(self.config, job.kind, named.name)}.json"
        _say_why(named.name, path, last, job.parts, self.config.data.overwrite_cache)
        began = time.monotonic()
        replace = self.config.data.overwrite_cache or _is_damaged(path)
        report = job.build(path, {"key": key, "parts": job.parts}, replace=replace)
        logger.info(
            "data: %s: %d %s in %.1f s, kept in %s",
            named.name, report.rows, report.unit, time.monotonic() - began, path,
        )  # fmt: skip
        _remember(last, job.parts)

    def _there_already(self, named: NamedSet, prefix: Path) -> tuple[str, PreparedSet]:
        """Token files of any writer: read through once, then remembered."""
        is_packed = self.config.training.stage == "sft"
        tokens = part_prefix(prefix, SFT_PARTS[0]) if is_packed else prefix
        check_tokenizer(tokens, self.tokenizer)
        key = keys.indexed_key(idx_path(tokens), bin_path(tokens).stat().st_size)
        kind: Literal["packed", "indexed"] = "packed" if is_packed else "indexed"
        count = self._packed_report if is_packed else _indexed_report
        report = self._remembered(kind, bin_path(tokens), lambda: count(prefix))
        if self.config.data.append_eod and not is_packed:
            _tell_of_missing_ends(prefix, self.tokenizer)
        if is_packed and report.longest > self.config.data.cutoff_len:
            raise UserError(
                f"data.cutoff_len: {prefix} holds a sample of {report.longest} tokens, more than "
                f"{self.config.data.cutoff_len}; set data.cutoff_len to {report.longest}, or preprocess with "
                f"--seq-length {self.config.data.cutoff_len}"
            )
        return key, PreparedSet(kind, named.name, str(prefix), report.to_json(), named.weight)

    def _packed_report(self, prefix: Path) -> Report:
        samples = PackedSamples(prefix)
        report = Report("packed samples")
        for begin in range(0, len(samples), _COUNTED_AT_ONCE):
            end = min(begin + _COUNTED_AT_ONCE, len(samples))
            block = SampleBlock.of([samples[index] for index in range(begin, end)])
            report.add(Encoded(block, rows=end - begin))
        return report

    def _remembered(self, kind: str, file: Path, count: Callable[[], Report]) -> Report:
        """What ``count`` finds in ``file``; counted once, and remembered by the file's size and times."""
        state = file.stat()
        memo = self.cache / "counted" / f"{keys.digest({'kind': kind, 'file': str(file)})}.json"
        stamp = [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
        try:
            known = json.loads(memo.read_text(encoding="utf-8"))
            if known["stamp"] == stamp:
                return Report.from_json(known["report"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if state.st_size > 2**30:
            logger.info("data: reading through %s (%.1f GiB), once", file, state.st_size / 2**30)
        report = count()
        _write_quietly(memo, {"stamp": stamp, "report": report.to_json()})
        return report


def _tell_of_missing_ends(prefix: Path, tokenizer: Any) -> None:
    """Warn where ``append_eod`` promises end tokens that the files, which stay as they are, do not have."""
    reader = IndexedReader(prefix)
    looked_at = range(min(reader.num_documents, _COUNTED_AT_ONCE))
    ends = [reader.document(number)[-1:].tolist() for number in looked_at]
    lacking = sum(end != [tokenizer.eos_token_id] for end in ends if end)
    if lacking:
        logger.warning(
            "data.append_eod: true, but %d of the first %d documents of %s do not end with the tokenizer's "
            "eos "
            "token (%s), and token files are trained as they are: preprocess them with --append-eod",
            lacking, len(looked_at), prefix, tokenizer.eos_token,
        )  # fmt: skip


def _indexed_report(prefix: Path) -> Report:
    """The documents, and the largest id: one beyond the vocabulary must be found before it is trained."""
    reader = IndexedReader(prefix)
    return Report("documents", rows=reader.num_documents, largest_id=reader.largest_id())


def cache_folder(config: Config) -> Path:
    """Where tokenised samples and documents are kept."""
    return Path(config.model.cache_dir or "~/.cache/shardyard").expanduser().absolute() / "tokenized"


@dataclass(frozen=True)
class _Job:
    """The tokenising of one entry."""

    config: Config
    tokenizer: Any
    entry: DatasetEntry
    facts: Mapping[Path, keys.FileFacts]
    local_ranks: int

    kind: ClassVar[Literal["samples", "documents"]]

    @cached_property
    def parts(self) -> dict[str, Any]:
        raise NotImplementedError

    def build(self, path: Path, manifest: dict[str, Any], *, replace: bool) -> Report:
        raise NotImplementedError

    @property
    def workers(self) -> int:
        size = sum(file.stat().st_size for file in self.entry.files)
        return self.config.data.preprocessing_num_workers or default_workers(size, self.local_ranks)


class _Rows(_Job):
    """Conversations to samples."""

    kind: ClassVar[Literal["samples", "documents"]] = "samples"

    @cached_property
    def parts(self) -> dict[str, Any]:
        return keys.sample_parts(self.config, self.entry, self.tokenizer, self.facts)

    def build(self, path: Path, manifest: dict[str, Any], *, replace: bool) -> Report:
        data = self.config.data
        pipeline = FinetunePipeline(
            [self.entry], Encoder.from_config(self.config, self.tokenizer), max_samples=data.max_samples,
            batch_size=data.preprocessing_batch_size, on_bad_row=data.on_bad_row,
        )  # fmt: skip
        with StoreWriter(path) as writer:
            report = run_pipeline(pipeline, writer, workers=self.workers, total=self._expected_rows())
            report.require_training_data()
            writer.finish({**manifest, "report": report.to_json()}, replace=replace)
        return report

    def _expected_rows(self) -> int | None:
        """The rows of the entry, where they can be told without reading it again (a JSON array's cannot)."""
        rows = 0
        for file in self.entry.files:
            if file.suffix.lower() == ".jsonl":  # counted while it was hashed
                rows += self.facts[file].newlines
            elif sources.file_type(file) in (".parquet", ".arrow"):
                rows += sources.count_rows(file)
            else:
                return None
        rows = self.entry.num_samples or rows
        limit = self.config.data.max_samples
        return rows if limit is None else min(rows, limit)


class _Documents(_Job):
    """Texts to .bin/.idx."""

    kind: ClassVar[Literal["samples", "documents"]] = "documents"

    @cached_property
    def parts(self) -> dict[str, Any]:
        return keys.document_parts(self.config, self.entry, self.tokenizer, self.facts)

    def build(self, path: Path, manifest: dict[str, Any], *, replace: bool) -> Report:
        data = self.config.data
        if data.append_eod and self.tokenizer.eos_token_id is None:
            raise UserError(
                "data.append_eod: the tokenizer has no eos token to end a document with; set it to false"
            )
        with NewFolder(path) as folder:
            written = write_documents(
                self.entry, self.tokenizer, folder.temporary / DOCUMENTS, append_eod=data.append_eod,
                workers=self.workers, max_documents=data.max_samples, on_bad_row=data.on_bad_row,
                split_special_tokens=self.config.model.split_special_tokens,
            )  # fmt: skip
            report = _document_counts(written)
            if report.tokens < 2:
                report.require_training_data()
            folder.finish({**manifest, "format": FORMAT, "report": report.to_json()}, replace=replace)
        return report


def _document_counts(written: DocumentsReport) -> Report:
    dropped = {reason: Dropped(count, first) for reason, (count, first) in written.dropped.items()}
    return Report(
        "documents", rows=written.rows, dropped=dropped, tokens=written.tokens, longest=written.longest,
        largest_id=written.largest_id,
    )  # fmt: skip


def _is_ready(path: Path, key: str, parts: Mapping[str, Any], explicit: bool) -> bool:
    manifest = read_manifest(path)
    if manifest is None:
        return False
    if manifest.get("key") != key:
        if not explicit:
            return False
        changes = "; ".join(keys.differences(manifest.get("parts", {}), parts)) or "the key"
        raise UserError(
            f"data.tokenized_path: {path} holds samples that were made otherwise: {changes}. Give another "
            f"folder, or set data.overwrite_cache to true to replace them"
        )
    try:
        check_folder(path, FORMAT)
    except UserError as error:
        logger.warning("data: %s; building it again", error)
        return False
    logger.info("data: from the cache %s", path)
    return True


def _is_damaged(path: Path) -> bool:
    try:
        check_folder(path, FORMAT)
    except UserError:
        return True
    return False


def _refuse_foreign_folder(path: Path) -> None:
    if path.exists() and read_manifest(path) is None and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"data.tokenized_path: {path} holds something other than tokenised samples of this program; "
            f"give another folder, or an empty one"
        )


def _say_why(name: str, path: Path, last: Path, parts: Mapping[str, Any], overwrite: bool) -> None:
    if overwrite:
        logger.info("data: %s: tokenising (data.overwrite_cache is true)", name)
        return
    try:
        before = json.loads(last.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    changes = keys.differences(before, parts) if isinstance(before, dict) else []
    if changes:
        logger.info("data: %s: tokenising again: %s", name, "; ".join(changes))
    else:
        logger.info("data: %s: tokenising (nothing in %s yet)", name, path)


def _remember(last: Path, parts: Mapping[str, Any]) -> None:
    _write_quietly(last, parts)  # only tells why a later run tokenises again


def _write_quietly(file: Path, values: Any) -> None:
    """Write a note that saves time or tells more, but that nothing depends on."""
    temporary = file.with_name(f"{file.name}.{id(values)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, ensure_ascii=False, default=str), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.debug("cannot write %s: %s", file, error)
