"""From the settings to a stream that a run trains on."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardyard.config import Config
from shardyard.config.data_rules import probabilities
from shardyard.data import sources
from shardyard.data.report import Report
from shardyard.data.sources import DatasetEntry
from shardyard.data.stream.address import place
from shardyard.data.stream.ahead import LookAhead, can_look_ahead
from shardyard.data.stream.cache import WindowCache
from shardyard.data.stream.mixture import Mixture, Source
from shardyard.data.stream.reader import RowReader
from shardyard.data.stream.run_folder import RunFolder, remove_ownerless, run_path
from shardyard.data.stream.sampler import StreamSampler
from shardyard.data.stream.store import StreamStore, Taken
from shardyard.data.stream.tokenise import Conversations, Method, TokenStream, WindowMaker
from shardyard.data.stream.window import Window
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")

_LOOKED_AT = 100
"""Samples of the first window in which one for the eye is looked for."""


@dataclass
class Stream:
    """What a run reads instead of a store of all samples. ``close`` it when the run is over."""

    store: StreamStore
    sampler: StreamSampler
    order: str
    """What a position depends on beside the contents of the data, as text: a cursor counts in this order."""
    first_report: Report
    """What became of the rows of the first window."""
    preview_sample: Sample | None
    """A sample of the first window, with a trained token; None if it has none."""
    folder: Path
    ahead: LookAhead | None = None
    _owned: RunFolder | None = field(default=None, repr=False)

    def close(self) -> None:
        """End the process that works ahead and remove the windows; only the local leader has either."""
        atexit.unregister(self.close)
        if self.ahead is not None:
            self.ahead.close()
        if self._owned is not None:
            self._owned.remove()


@dataclass(frozen=True)
class Seat:
    """A rank's place on its node: the windows lie in ``root/key/run_id``, and the leader looks after them."""

    root: Path
    key: str
    run_id: str
    is_local_leader: bool


def build_stream(
    config: Config,
    entries: Sequence[DatasetEntry],
    tokenizer: Any,
    *,
    key: str,
    run_id: str,
    folder: Path,
    is_local_leader: bool,
    global_batch: int,
    vocab_size: int | None = None,
    start_cursor: int = 0,
) -> Stream:
    """The stream of a run, on each of its ranks; its windows lie in ``folder/key/run_id``.

    ``key`` stands for the contents of the data and the tokenizer, ``run_id`` for this run on this node: all
    ranks of the node give the same, and no other run does. The local leader makes the first window here (that
    of ``start_cursor`` in a run that resumes), so that what is wrong with the data is told before the first
    step; the other ranks wait for it. Token ids from ``vocab_size`` on are refused, in every window.

    Raises:
        UserError: a file cannot be read, a bad row, or nothing to train on.
    """
    method = make_method(config, entries, tokenizer)
    seat = Seat(folder, key, run_id, is_local_leader)
    return open_stream(
        config, entries, method, seat,
        global_batch=global_batch, vocab_size=vocab_size, start_cursor=start_cursor,
    )  # fmt: skip


def open_stream(
    config: Config,
    entries: Sequence[DatasetEntry],
    method: Method,
    seat: Seat,
    *,
    global_batch: int,
    vocab_size: int | None = None,
    start_cursor: int = 0,
    look_ahead: bool = True,
) -> Stream:
    """``build_stream`` with any way of turning rows into samples, and with or without the look-ahead."""
    maker = make_maker(config, entries, method, vocab_size=vocab_size)
    cache = WindowCache(run_path(seat.root, seat.key, seat.run_id), maker)
    leads, workers = seat.is_local_leader, config.data.preprocessing_num_workers or 1
    owned = RunFolder(seat.root, seat.key, seat.run_id) if leads else None
    ahead = LookAhead(cache, workers) if leads and look_ahead and can_look_ahead() else None
    taken = Taken(method.unit)
    sampler = StreamSampler(
        cache,
        taken,
        global_batch=global_batch,
        max_steps=config.training.max_steps,
        shuffle=not config.training.disable_shuffling,
        ahead=ahead,
        removes=leads,
    )
    order = describe(config, len(entries))
    stream = Stream(StreamStore(cache, taken), sampler, order, taken.report, None, cache.folder, ahead, owned)
    try:
        first = _first_window(cache, start_cursor, workers if leads else 1)
    except BaseException:
        stream.close()
        remove_ownerless(cache.folder)
        raise
    atexit.register(stream.close)
    stream.first_report = first.report
    stream.preview_sample = _for_the_eye(first)
    if leads and not first.report.trained_tokens:
        logger.warning(
            "data: nothing of the first window would be trained; going on with the next\n%s",
            "\n".join(first.report.lines()),
        )
    return stream


def make_method(config: Config, entries: Sequence[DatasetEntry], tokenizer: Any) -> Method:
    """How these settings turn rows into samples."""
    data = config.data
    if data.data_manager_type == "mg":
        from shardyard.data.pretrain import DocumentTokenizer

        tokenize = DocumentTokenizer(
            tokenizer, append_eod=data.append_eod, split_special_tokens=config.model.split_special_tokens
        )
        return TokenStream(
            tokenize, cutoff_len=data.cutoff_len, reset_attention_mask=data.reset_attention_mask
        )
    from shardyard.data.encode import Encoder

    packs = data.packing or data.neat_packing
    encoder = Encoder.from_config(config, tokenizer)
    return Conversations(entries, encoder, capacity=data.cutoff_len if packs else None)


def make_maker(
    config: Config, entries: Sequence[DatasetEntry], method: Method, *, vocab_size: int | None = None
) -> WindowMaker:
    """What makes the windows of these settings."""
    data, shares = config.data, None
    if data.interleave_probs is not None:
        shares = probabilities(data.interleave_probs)
        if len(shares) != len(entries):
            raise UserError(
                f"data.interleave_probs: {len(shares)} shares for {len(entries)} data sets; give one for each"
            )
    mixture = Mixture([_source(config, entry) for entry in entries], data.mix_strategy, shares)
    return WindowMaker(
        RowReader(mixture, data.buffer_size),
        method,
        seed=config.training.seed,
        shuffle=not config.training.disable_shuffling,
        batch_size=data.preprocessing_batch_size,
        vocab_size=vocab_size,
    )


def describe(config: Config, num_entries: int) -> str:
    """All that a position in a stream depends on beside the rows and their tokens."""
    data, training = config.data, config.training
    parts = [f"stream of windows of {data.buffer_size} rows", f"seed {training.seed}"]
    parts.append(f"shuffled {not training.disable_shuffling}")
    if num_entries > 1:
        shares = f" {data.interleave_probs}" if data.interleave_probs else ""
        parts.append(f"{num_entries} data sets by {data.mix_strategy}{shares}")
    if data.data_manager_type == "mg":
        parts.append(f"samples of {data.cutoff_len} tokens, reset {data.reset_attention_mask}")
    elif data.packing or data.neat_packing:
        parts.append(f"packs of {data.cutoff_len} tokens")
    return ", ".join(parts)


def _source(config: Config, entry: DatasetEntry) -> Source:
    policy = config.data.on_bad_row
    if config.data.data_manager_type == "mg":
        opened = partial(sources.iter_texts, entry, on_bad_row=policy)
    else:
        opened = partial(sources.iter_rows, entry, on_bad_row=policy)
    return Source(entry.name, opened, partial(_count, entry))


def _count(entry: DatasetEntry) -> int:
    return entry.num_samples if entry.num_samples is not None else sources.count_entry_rows(entry)


def _first_window(cache: WindowCache, cursor: int, workers: int) -> Window:
    epoch, window, _ = place(cursor)
    first = cache.get(epoch, window, workers=workers)
    if first is None:
        raise UserError(
            f"data.dataset: the input has no {cache.maker.unit}"
            + (f" at the position to go on from (window {window} of epoch {epoch})" if cursor else "")
        )
    if cache.windows_per_epoch == 1:
        first.report.require_training_data()
    return first


def _for_the_eye(window: Window) -> Sample | None:
    samples = map(window.sample, range(min(window.num_samples, _LOOKED_AT)))
    return next((sample for sample in samples if (sample.labels != IGNORE_INDEX).any()), None)
