"""The training data of a run: found in the cache by content, or tokenised by one rank and read by all."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config import Config
from shardyard.data import key as keys
from shardyard.data import sources
from shardyard.data.leader import Prepared, Rendezvous, Role, prepare_once
from shardyard.data.pipeline import Pipeline, run_pipeline
from shardyard.data.report import Preview, Report, preview
from shardyard.data.sources import DatasetEntry
from shardyard.data.store import SampleStore, StoreWriter, read_manifest
from shardyard.data.types import IGNORE_INDEX
from shardyard.data.workers import default_workers
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")


@dataclass(frozen=True)
class TrainData:
    """The samples of a run, what became of the input, and one sample for the eye."""

    store: SampleStore
    report: Report
    preview: Preview

    @property
    def preview_text(self) -> str:
        """The preview's text, trained parts in ``[[ ]]``."""
        return self.preview.text


def build_train_data(
    config: Config,
    tokenizer: Any,
    *,
    role: Role | None = None,
    rendezvous: Rendezvous | None = None,
    local_ranks: int = 1,
) -> TrainData:
    """Tokenise the data set of ``config``, or open what an earlier run has tokenised from the same content.

    The leader of each group of ranks works; the others wait at ``rendezvous``, without a collective. The
    samples lie in ``<model.cache_dir or ~/.cache/shardyard>/tokenized/<key>``, or in ``data.tokenized_path``:
    a folder that is absent or empty is filled, one that holds samples of the same key is read, any other is
    refused (with ``overwrite_cache``, samples of another key are replaced; a folder that holds something else
    never is).

    Raises:
        UserError: on every rank, for a fault in the input or settings, or when nothing would be trained.
    """
    prepared = prepare_once(
        lambda: _prepare(config, tokenizer, local_ranks), role or Role(), rendezvous, name="train"
    )
    store = _open(prepared.path, config)
    return TrainData(store, Report.from_json(store.manifest["report"]), _preview(store, tokenizer))


def cache_folder(config: Config) -> Path:
    """Where tokenised samples are kept."""
    return Path(config.model.cache_dir or "~/.cache/shardyard").expanduser().absolute() / "tokenized"


def _open(path: Path, config: Config) -> SampleStore:
    if config.data.data_shared_file_system and not path.exists():
        raise UserError(
            f"data.data_shared_file_system: true, but {path}, which rank 0 wrote, is not to be seen from "
            "this machine; put model.cache_dir or data.tokenized_path on the shared file system, or set it "
            "to false"
        )
    return SampleStore.open(path)


def _prepare(config: Config, tokenizer: Any, local_ranks: int) -> Prepared:
    if config.data.dataset is None:
        raise UserError("data.dataset: nothing to train on; name a file, a folder or a data set")
    cache = cache_folder(config)
    entries = sources.resolve_datasets(config.data.dataset, config.data.dataset_dir)
    hasher = keys.FileHasher(cache / "files.json")
    facts = {file: hasher.facts(file) for entry in entries for file in entry.files}
    parts = keys.key_parts(config, entries, tokenizer, facts)
    key = keys.digest(parts)
    named = config.data.tokenized_path
    path = Path(named).expanduser().absolute() if named else cache / key
    if not config.data.overwrite_cache and _is_ready(path, key, parts, explicit=path != cache / key):
        return Prepared(path, key)
    if path != cache / key:
        _refuse_foreign_folder(path)
    last = cache / "last" / f"{keys.identity(config)}.json"
    _say_why(path, last, parts, config.data.overwrite_cache)
    workers = config.data.preprocessing_num_workers or default_workers(
        sum(file.stat().st_size for file in facts), local_ranks
    )
    began = time.monotonic()
    pipeline = make_pipeline(config, tokenizer, entries)
    with StoreWriter(path) as writer:
        total = _expected_rows(entries, facts, config.data.max_samples)
        report = run_pipeline(pipeline, writer, workers=workers, total=total)
        report.require_training_data()
        manifest = {"key": key, "parts": parts, "report": report.to_json()}
        writer.finish(manifest, replace=config.data.overwrite_cache or _is_damaged(path))
    logger.info(
        "data: %d samples from %d %s in %.1f s (%d %s), kept in %s",
        report.samples, report.rows, report.unit, time.monotonic() - began, workers,
        "process" if workers == 1 else "processes", path,
    )  # fmt: skip
    _remember(last, parts)
    return Prepared(path, key)


def make_pipeline(config: Config, tokenizer: Any, entries: Sequence[DatasetEntry]) -> Pipeline:
    """The way from these entries to samples: a token stream for ``mg``, conversations for ``lf``."""
    data = config.data
    if data.data_manager_type == "mg":
        from shardyard.data.pretrain import DocumentTokenizer, PretrainPipeline, Windows

        tokenize = DocumentTokenizer(
            tokenizer, append_eod=data.append_eod, split_special_tokens=config.model.split_special_tokens
        )
        windows = Windows(data.cutoff_len, reset_attention_mask=data.reset_attention_mask)
        return PretrainPipeline(
            entries, tokenize, windows, max_samples=data.max_samples, batch_size=data.preprocessing_batch_size
        )
    from shardyard.data.encode import Encoder
    from shardyard.data.finetune import FinetunePipeline

    encoder = Encoder.from_config(config, tokenizer)
    return FinetunePipeline(
        entries, encoder, max_samples=data.max_samples, batch_size=data.preprocessing_batch_size
    )


def _is_ready(path: Path, key: str, parts: Mapping[str, Any], *, explicit: bool) -> bool:
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
        store = SampleStore.open(path)
    except UserError as error:
        logger.warning("data: %s; building it again", error)
        return False
    logger.info("data: %d samples from the cache %s", len(store), path)
    return True


def _is_damaged(path: Path) -> bool:
    if read_manifest(path) is None:
        return True
    try:
        SampleStore.open(path)
    except UserError:
        return True
    return False


def _refuse_foreign_folder(path: Path) -> None:
    if path.exists() and read_manifest(path) is None and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"data.tokenized_path: {path} holds something other than tokenised samples of this program; "
            f"give another folder, or an empty one"
        )


def _say_why(path: Path, last: Path, parts: Mapping[str, Any], overwrite: bool) -> None:
    if overwrite:
        logger.info("data: tokenising (data.overwrite_cache is true)")
        return
    try:
        before = json.loads(last.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    changes = keys.differences(before, parts) if isinstance(before, dict) else []
    if changes:
        logger.info("data: tokenising again: %s", "; ".join(changes))
    else:
        logger.info("data: tokenising (nothing in %s yet)", path)


def _remember(last: Path, parts: Mapping[str, Any]) -> None:
    temporary = last.with_name(f"{last.name}.{id(parts)}")
    try:  # only tells why a later run tokenises again
        last.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(parts, ensure_ascii=False, default=str), encoding="utf-8")
        temporary.replace(last)
    except OSError as error:
        logger.debug("cannot write %s: %s", last, error)


def _expected_rows(
    entries: Sequence[DatasetEntry], facts: Mapping[Path, keys.FileFacts], max_samples: int | None
) -> int | None:
    """The rows of the input, where they can be told without reading it again (a JSON array's cannot)."""
    total = 0
    for entry in entries:
        rows = 0
        for file in entry.files:
            if file.suffix in (".jsonl", ".txt"):
                rows += facts[file].newlines
            elif file.suffix == ".parquet":
                rows += sources.parquet_rows(file)
            else:
                return None
        if entry.num_samples is not None:
            rows = entry.num_samples
        total += rows if max_samples is None else min(rows, max_samples)
    return total


def _preview(store: SampleStore, tokenizer: Any) -> Preview:
    """The first sample with a trained token, of the first hundred."""
    candidates = (store[index] for index in range(min(len(store), 100)))
    sample = next((s for s in candidates if (s.labels != IGNORE_INDEX).any()), store[0])
    return preview(sample, tokenizer)
