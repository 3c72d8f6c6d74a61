"""Samples to micro-batches (rows end to end, no padding), and the loader that makes them ahead of the step.

Legend: T tokens of a micro-batch, D documents in it, R rows of it.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from shardyard.data.cut import Cut, doc_lens_of
from shardyard.data.sampler import GlobalBatch, Sampler, Unit
from shardyard.data.types import IGNORE_INDEX, MicroBatch, Sample, StepBatch
from shardyard.data.workers import quiet_forks
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.device import Arrival, CopyStream


class Samples(Protocol):
    """Whatever gives samples by number: a ``SampleStore``, windows of a token stream, a list in a test."""

    def __getitem__(self, index: int, /) -> Sample: ...


def collate(samples: Sequence[Sample], sample_ids: Sequence[int], filler_token: int) -> MicroBatch:
    """Lay R samples end to end as one micro-batch; positions restart at 0 in each document.

    ``sample_ids`` are the numbers of the samples in it (more than R where packs are merged). Without samples:
    the filler, one ``filler_token`` that has no label and no sample id.
    """
    if not samples:
        samples = [
            Sample(np.array([filler_token], np.int32), np.array([IGNORE_INDEX], np.int32), doc_lens=(1,))
        ]
    input_ids = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
    labels = np.concatenate([sample.labels for sample in samples]).astype(np.int64)
    doc_lens = tuple(length for sample in samples for length in sample.doc_lens)
    if not len(input_ids) == len(labels) == sum(doc_lens):
        raise ValueError(
            f"samples {list(sample_ids)}: {len(input_ids)} ids, {len(labels)} labels and documents of "
            f"{sum(doc_lens)} tokens do not fit together"
        )
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(restarting_positions(doc_lens)),
        doc_lens=doc_lens,
        sample_ids=tuple(int(index) for index in sample_ids),
        num_labelled=int(np.count_nonzero(labels != IGNORE_INDEX)),
    )


def merged(samples: Sequence[Sample]) -> Sample:
    """The samples of a pack as one attention segment, for ``data.cross_document_attention``."""
    input_ids = np.concatenate([sample.input_ids for sample in samples])
    labels = np.concatenate([sample.labels for sample in samples])
    return Sample(input_ids, labels, (len(input_ids),))


def restarting_positions(doc_lens: Sequence[int]) -> np.ndarray:
    """0, 1, ... within each document, int64 [T]."""
    lengths = np.asarray(doc_lens, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


class BatchLoader:
    """Yields this rank's ``StepBatch`` of each update, from ``start_cursor`` to the end of the run.

    The order depends on the sampler alone: worker processes only fetch and collate. They live for one epoch,
    or for the whole run with ``persistent_workers``. ``pin_memory`` acts where an accelerator is present. The
    process's own random state is left untouched.

    ``start_step`` (updates made before ``start_cursor``) matters only to ``max_steps`` runs that resume: the
    loader gives ``sampler.last_step(...) - start_step`` batches; by default it is what this sampler makes of
    the cursor. ``merge_packs`` lets the samples of a pack see each other.

    ``per_device`` rows make a micro-batch, in training order; ``cut`` says otherwise how global batches are
    cut, for all ranks the same. With ``copies`` the tensors are the device's, and each batch is on its way
    while the one before it is trained.
    """

    def __init__(
        self,
        store: Samples,
        sampler: Sampler,
        *,
        dp_rank: int,
        dp_size: int,
        per_device: int,
        start_cursor: int = 0,
        start_step: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        filler_token: int = 0,
        merge_packs: bool = False,
        cut: Cut | None = None,
        copies: CopyStream | None = None,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not one of {dp_size} ranks")
        if persistent_workers and num_workers == 0:
            raise UserError(
                "training.dataloader_persistent_workers: true needs training.dataloader_num_workers of at "
                "least 1"
            )
        if prefetch_factor is not None and num_workers == 0:
            raise UserError(
                f"training.dataloader_prefetch_factor: {prefetch_factor} needs "
                "training.dataloader_num_workers of at least 1"
            )
        self._sampler = sampler
        self._copies = copies
        self._start_cursor = start_cursor
        self._num_steps = sampler.steps_from(start_cursor, start_step)
        self._epoch = _EpochBatches()
        self._loader = DataLoader(
            cast(Any, _RankShare(store, dp_rank, dp_size, cut or Cut(per_device), filler_token, merge_packs)),
            batch_size=None,
            sampler=self._epoch,
            collate_fn=cast(Any, _as_it_is),
            num_workers=num_workers,
            multiprocessing_context=_start_method() if num_workers else None,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            generator=torch.Generator(),  # or each epoch would draw its workers' seed from the global one
        )

    def __len__(self) -> int:
        """The number of batches that iterating yields."""
        return self._num_steps

    def __iter__(self) -> Iterator[StepBatch]:
        batches = self._batches()
        if self._copies is None:
            return map(_Loaded.unpack, batches)
        return _one_ahead(batches, self._copies)

    def _batches(self) -> Iterator[_Loaded]:
        cursor, left = self._start_cursor, self._num_steps
        while left > 0:
            self._epoch.begin(self._sampler, cursor, left)
            for loaded in self._epoch_iterator():
                cursor, left = loaded.batch.end, left - 1
                yield loaded

    def _epoch_iterator(self) -> Iterator[_Loaded]:
        try:
            with quiet_forks(), warnings.catch_warnings():
                # torch compares with this rank's share of the cores; the number is the user's choice
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                iterator = iter(self._loader)
            yield from iterator
        except RuntimeError as error:
            text = str(error)
            if "exited unexpectedly" in text or "is killed by signal" in text:
                raise UserError(
                    f"training.dataloader_num_workers: a data worker process died ({text}); most often "
                    "memory or /dev/shm ran out: set fewer workers or a smaller dataloader_prefetch_factor"
                ) from error
            raise


class _EpochBatches:
    """The DataLoader's sampler: the batches from a cursor to the end of its epoch, at most ``limit``."""

    def __init__(self) -> None:
        self._args: tuple[Sampler, int, int] | None = None

    def begin(self, sampler: Sampler, cursor: int, limit: int) -> None:
        self._args = (sampler, cursor, limit)

    def __iter__(self) -> Iterator[GlobalBatch]:
        assert self._args is not None
        sampler, cursor, limit = self._args
        for _ in range(limit):
            batch = sampler.global_batch_at(cursor)
            cursor = batch.end
            yield batch
            if sampler.ends_epoch(cursor):
                return


@dataclass(frozen=True)
class _RankShare:
    """The DataLoader's data set: global batch -> this rank's micro-batches; read by workers if any."""

    store: Samples
    dp_rank: int
    dp_size: int
    cut: Cut
    filler_token: int
    merge_packs: bool

    def __getitem__(self, batch: GlobalBatch) -> _Loaded:
        shares = self.cut.share(batch.units, self._doc_lens, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return _Loaded.pack([self._micro_batch(units) for units in shares], batch)

    def _doc_lens(self, unit: Unit) -> Sequence[int]:
        documents = [length for index in unit for length in doc_lens_of(self.store, index)]
        return [sum(documents)] if self.merge_packs else documents

    def _micro_batch(self, units: Sequence[Unit]) -> MicroBatch:
        samples = [[self.store[index] for index in unit] for unit in units]
        if self.merge_packs:
            samples = [[merged(pack)] for pack in samples]
        ids = [index for unit in units for index in unit]
        return collate([sample for pack in samples for sample in pack], ids, self.filler_token)


@dataclass(frozen=True)
class _Loaded:
    """A ``StepBatch`` whose tensors are one buffer, int64 [3, T of all micro-batches].

    Every tensor that a worker sends costs a file descriptor: with long accumulation, three per micro-batch
    run into the process's limit. One also pins in one go.
    """

    buffer: torch.Tensor
    micro_batches: tuple[MicroBatch, ...]
    batch: GlobalBatch

    @classmethod
    def pack(cls, micro_batches: Sequence[MicroBatch], batch: GlobalBatch) -> _Loaded:
        columns = [torch.stack((m.input_ids, m.labels, m.position_ids)) for m in micro_batches]
        nothing = torch.empty(0, dtype=torch.int64)
        bare = tuple(
            replace(m, input_ids=nothing, labels=nothing, position_ids=nothing) for m in micro_batches
        )
        return cls(torch.cat(columns, dim=1), bare, batch)

    def pin_memory(self) -> _Loaded:
        return replace(self, buffer=self.buffer.pin_memory())

    def unpack(self) -> StepBatch:
        columns = self.buffer.split([sum(m.doc_lens) for m in self.micro_batches], dim=1)
        micro_batches = tuple(
            replace(m, input_ids=ids, labels=labels, position_ids=positions)
            for m, (ids, labels, positions) in zip(self.micro_batches, columns, strict=True)
        )
        batch = self.batch
        return StepBatch(micro_batches, batch.epoch, batch.start, batch.end, len(batch.units))


def _one_ahead(batches: Iterable[_Loaded], copies: CopyStream) -> Iterator[StepBatch]:
    """The batches on the device, each given away once the copy of the next one has begun."""
    waiting: tuple[_Loaded, Arrival] | None = None
    for loaded in batches:
        before, waiting = waiting, (loaded, copies.start(loaded.buffer))
        if before is not None:
            yield replace(before[0], buffer=before[1].wait()).unpack()
    if waiting is not None:
        yield replace(waiting[0], buffer=waiting[1].wait()).unpack()


def _start_method() -> str | None:
    """How workers start: forked where the system can, whatever Python's default is.

    A worker ends with its parent. With forkserver the parent is the server and not the rank, so the workers
    of a rank that was killed would stay for ever.
    """
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else None


def _as_it_is(loaded: _Loaded) -> _Loaded:
    return loaded
