"""The tensors of a model, from the ranks that hold them into files that several ranks write at the same time.

Each file has one rank that writes it, its owner. What an owner has to write is cut into jobs of bounded size
(rows of a tensor, some experts), and all ranks go through the jobs in rounds: in a round each owner gets the
pieces of its next job from the ranks that hold them, turns them back into their form on disk and writes them.
No rank ever holds more of a tensor than a job, beside its own shards.

All ranks know all jobs, so nothing is announced. In each round a rank first offers the memory that it
receives into and then sends, so no two ranks wait for each other. It writes what has come while the next
round is under way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.hf_files import FilePlan, FileWriter
from shardyard.checkpoint.pieces import Box, Pieces
from shardyard.checkpoint.turning_back import Unit
from shardyard.errors import UserError

_AGREE_EVERY = 64
"""Rounds after which all ranks learn whether one of them has failed."""
_CHUNK = 1 << 18
"""Elements that are looked at at a time."""


@dataclass(frozen=True)
class Task:
    """What all ranks know of an export."""

    units: Sequence[Unit]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's tensors."""
    dtypes: Mapping[str, torch.dtype]
    """The same."""
    pieces: Pieces
    plan: FilePlan
    aliases: Mapping[str, tuple[str, ...]]
    """A name on disk -> the names that its tensor has there, where that is not the one name."""
    owners: Sequence[int]
    """Of each file of the plan, the rank that writes it."""
    job_bytes: float
    """The size of a job, where a tensor can be cut that far."""

    def names_of(self, name: str) -> tuple[str, ...]:
        return self.aliases.get(name, (name,))

    def wire_dtype(self, unit: Unit) -> torch.dtype | None:
        """The dtype in which floating inputs are sent: the one on disk, if all outputs have the same."""
        found = {self.plan.places[each].dtype for name in unit.facts for each in self.names_of(name)}
        return found.pop() if len(found) == 1 else None


class Job(NamedTuple):
    """Rows ``start`` to ``stop`` of a unit's one input; all rows of all inputs where its form is whole."""

    unit: Unit
    start: int
    stop: int

    def region(self, shape: tuple[int, ...]) -> Box:
        """What it needs of an input."""
        if self.unit.form == "whole" or not shape:
            return Box((0,) * len(shape), shape)
        return Box((self.start, *(0 for _ in shape[1:])), (self.stop - self.start, *shape[1:]))


def jobs_by_owner(task: Task) -> dict[int, list[Job]]:
    """What each owner writes, in the order of the units. Two owners get the same job where its outputs lie in
    the files of both.
    """
    queues: dict[int, list[Job]] = {rank: [] for rank in task.owners}
    for unit in task.units:
        for job in _cut(unit, task):
            rows = unit.names[job.start : job.stop] if unit.form == "rows" else unit.names
            files = {task.plan.places[n].file for row in rows for name in row for n in task.names_of(name)}
            for owner in sorted({task.owners[file] for file in files}):
                queues[owner].append(job)
    return queues


def _cut(unit: Unit, task: Task) -> Iterator[Job]:
    shape = task.shapes[unit.inputs[0]]
    if unit.form == "whole" or not shape:
        yield Job(unit, 0, 1)
        return
    row_bytes = torch.Size(shape[1:]).numel() * task.dtypes[unit.inputs[0]].itemsize
    step = max(1, int(task.job_bytes // max(row_bytes, 1)))
    for start in range(0, shape[0], step):
        yield Job(unit, start, min(start + step, shape[0]))


class Stream:
    """One export, as one rank sees it. ``held`` are the tensors that this rank holds parts of."""

    def __init__(
        self, task: Task, held: Mapping[str, torch.Tensor], model: Any, peers: Peers, folder: Path
    ) -> None:
        self.task, self.held, self.model, self.peers = task, held, model, peers
        self._wire = {unit: task.wire_dtype(unit) for unit in task.units}
        self._boxes = {
            name: box for name, parts in task.pieces.items() for rank, box in parts if rank == peers.rank
        }
        self._tags = itertools.count()
        self._sent: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self._output = _Output(task, peers.rank, folder)

    def run(self, what: str) -> None:
        """Write all files; every rank calls it.

        Raises:
            UserError, RuntimeError: on every rank, as `Peers.agree` does, when one of them fails.
        """
        queues = jobs_by_owner(self.task)
        count = max(map(len, queues.values()), default=0)
        rounds = [{o: jobs[n] for o, jobs in queues.items() if n < len(jobs)} for n in range(count)]
        with self._output, torch.no_grad():
            for first in range(0, count, _AGREE_EVERY):
                self._go_through(rounds[first : first + _AGREE_EVERY])
                self.peers.agree(what, self._output.raise_failure)
            self._output.finish()
            self.peers.agree(what, self._output.raise_failure)

    def _go_through(self, rounds: Sequence[Mapping[int, Job]]) -> None:
        """What a round brings is written while the next one is under way."""
        pending: _Arriving | None = None
        for jobs in rounds:
            arriving = self._begin(jobs)
            self._take(pending)
            pending = arriving
        self._take(pending)
        self._wait_for_sent(0)

    def _begin(self, jobs: Mapping[int, Job]) -> _Arriving | None:
        """Offer memory for what comes in this round, and send what others get."""
        rank = self.peers.rank
        # Every rank counts every message, so that both ends of one know its tag.
        messages = {owner: list(self._messages(owner, job)) for owner, job in jobs.items()}
        arriving = _Arriving(self, jobs[rank], messages[rank]) if rank in jobs else None
        for owner, job in jobs.items():
            for giver, name, box, tag in messages[owner]:
                if giver == rank != owner:
                    self._send(self.part(name, box, job), owner, tag)
        return arriving

    def _take(self, arriving: _Arriving | None) -> None:
        if arriving is not None:
            tensors = arriving.wait()
            self._output.guard(lambda: self._output.write(self.model, arriving.job, tensors))

    def _messages(self, owner: int, job: Job) -> Iterator[tuple[int, str, Box, int]]:
        """(giver, tensor, box, tag) of each piece that ``job`` is put together of."""
        for name in job.unit.inputs:
            region = job.region(self.task.shapes[name])
            for giver, box in self.task.pieces[name]:
                if (common := box.overlap(region)) is not None:
                    yield giver, name, common, next(self._tags) % (1 << 30)

    def part(self, name: str, box: Box, job: Job) -> torch.Tensor:
        """``box`` of a tensor that this rank holds, on the host, in the dtype that is sent."""
        tensor = self.held[name].detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local[box.within(self._boxes[name])].to(self.dtype_of(name, job)).cpu().contiguous()

    def dtype_of(self, name: str, job: Job) -> torch.dtype:
        """That of ``name`` on the way to the owner of ``job``."""
        own = self.task.dtypes[name]
        return (self._wire[job.unit] or own) if own.is_floating_point else own

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        # What is no copy of ours costs nothing while it is under way, but is not told apart.
        self._wait_for_sent(self.task.job_bytes)
        data = _as_bytes(tensor)
        work = dist.isend(data, group=self.peers.group, group_dst=to, tag=tag)
        assert work is not None
        self._sent.append((work, data, data.nbytes))

    def _wait_for_sent(self, limit: float) -> None:
        """Until no more than ``limit`` bytes are under way."""
        while self._sent and (limit == 0 or sum(size for _, _, size in self._sent) > limit):
            self._sent.popleft()[0].wait()


class _Arriving:
    """The inputs of a job, being put together."""

    def __init__(self, stream: Stream, job: Job, messages: Sequence[tuple[int, str, Box, int]]) -> None:
        self.job = job
        self.tensors: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        for name in job.unit.inputs:
            region = job.region(stream.task.shapes[name])
            parts = [message for message in messages if message[1] == name]
            if [(giver, box) for giver, _, box, _ in parts] == [(stream.peers.rank, region)]:
                self.tensors[name] = stream.part(name, region, job)
                continue
            buffer = torch.empty(region.shape, dtype=stream.dtype_of(name, job))
            self.tensors[name] = buffer
            for giver, _, box, tag in parts:
                target = buffer[box.within(region)]
                if giver == stream.peers.rank:
                    target.copy_(stream.part(name, box, job))
                else:
                    self._receive(stream, target, giver, tag)

    def _receive(self, stream: Stream, target: torch.Tensor, giver: int, tag: int) -> None:
        direct = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        work = dist.irecv(_as_bytes(direct), group=stream.peers.group, group_src=giver, tag=tag)
        assert work is not None
        self._waiting.append((work, direct, target))

    def wait(self) -> dict[str, torch.Tensor]:
        for work, direct, target in self._waiting:
            work.wait()
            if direct is not target:
                target.copy_(direct)
        self._waiting = []
        return self.tensors


class _Output:
    """The files that this rank owns. A failure is kept, so that the others' messages are still taken."""

    def __init__(self, task: Task, rank: int, folder: Path) -> None:
        self.task, self.folder = task, folder
        self._mine = {number for number, owner in enumerate(task.owners) if owner == rank}
        self._left = {
            number: sum(place.size for place in task.plan.files[number].places.values())
            for number in self._mine
        }
        self._writers: dict[int, FileWriter] = {}
        self._stack = ExitStack()
        self._failure: Exception | None = None

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def guard(self, work: Callable[[], None]) -> None:
        """Do ``work`` unless something has failed before."""
        if self._failure is None:
            try:
                work()
            except Exception as error:
                self._failure = error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def write(self, model: Any, job: Job, tensors: dict[str, torch.Tensor]) -> None:
        """Turn the inputs of a job back and write what belongs into files of this rank.

        Raises:
            OSError: it cannot be written.
            UserError: NaN or Inf, in the dtype on disk.
        """
        on_disk = job.unit.turned_back(model, tensors, job.start)
        for first_name, tensor in on_disk.items():
            for name in self.task.names_of(first_name):
                place = self.task.plan.places[name]
                if place.file not in self._mine or not place.size:
                    continue
                data = tensor.to(place.dtype).contiguous()
                refuse_nonfinite(name, data)
                row_bytes = data.nbytes // max(len(data), 1) if data.ndim else 0
                start = job.start * row_bytes if job.unit.form == "same" else 0
                self._writer(place.file).write(name, data, start)
                self._left[place.file] -= data.nbytes
                if self._left[place.file] == 0:
                    self._finish(place.file)

    def finish(self) -> None:
        """Files without a byte are finished here; all others were when their last byte had come."""
        for number in sorted(self._left):
            self.guard(lambda number=number: self._finish(number))

    def _finish(self, number: int) -> None:
        self._writer(number).finish()
        self._left.pop(number)

    def _writer(self, number: int) -> FileWriter:
        if number not in self._writers:
            file = self.task.plan.files[number]
            self._writers[number] = self._stack.enter_context(FileWriter(file, self.folder / file.name))
        return self._writers[number]


def refuse_nonfinite(name: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        UserError: a floating tensor holds NaN or Inf; a value that its dtype cannot hold has become Inf.
    """
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    if all(bool(torch.isfinite(flat[n : n + _CHUNK]).all()) for n in range(0, len(flat), _CHUNK)):
        return
    limit = torch.finfo(tensor.dtype).max
    raise UserError(
        f"the trained weight {name} holds NaN or Inf in {tensor.dtype} (whose largest value is {limit:.5g}); "
        "it is not exported"
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
