"""The DCP files of a save: written, hashed on the way, and made durable."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.disks import Disks
from shardyard.checkpoint.manifest import METADATA, FileFacts
from shardyard.checkpoint.snapshot import DiskPlanner
from shardyard.durable import flush
from shardyard.errors import UserError

_FULL_MIB = 16.0
"""A disk with less free space than this counts as full when a write has failed."""


def write_tensors(
    tensors: dict[str, torch.Tensor], folder: Path, planner: DiskPlanner, peers: Peers, what: str
) -> dict[str, FileFacts]:
    """Write this rank's files, and rank 0 the metadata; the facts of this rank's files. Every rank calls it.

    Raises:
        UserError: on every rank, when one cannot write.
    """
    writer = HashingWriter(folder, planner.disks)
    try:
        dcp.save(
            dict(tensors), storage_writer=writer, planner=planner, process_group=peers.group,
            no_dist=peers.alone,
        )  # fmt: skip
    except dcp.api.CheckpointException as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        # Of the disk that failed, and in the same words on every rank.
        full, free = peers.gather(space_told(folder))[min(error.failures)]
        raise UserError(f"{what}: {full}{causes_of(error)}{free}") from error
    writer.share_metadata(peers, what)
    return writer.facts


class HashingWriter(FileSystemWriter):
    """A file-system writer that hashes what it writes, and writes metadata for each disk."""

    def __init__(self, folder: Path, disks: Disks) -> None:
        # Copying ahead to the host would take the current device, which a thread does not have.
        super().__init__(
            folder, single_file_per_rank=True, sync_files=True, thread_count=1, per_thread_copy_ahead=0
        )
        self.fs = self._files = _HashingFiles()
        self._folder = folder
        self._disks = disks
        self._for_disks: dict[int, bytes] = {}

    @property
    def facts(self) -> dict[str, FileFacts]:
        return {name: facts for name, facts in self._files.facts.items() if name.endswith(".distcp")}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # What torch's archive makes of a write that failed says nothing of the disk.
            if self._files.fault is not None:
                raise self._files.fault from error
            raise

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Each disk's metadata points to the files of that disk, where they hold a piece."""
        for leader in self._disks.leaders[1:]:
            own = self._disks.ranks_of(leader)
            others = [share for rank, share in enumerate(results) if rank not in own]
            super().finish(metadata, [*others, *(results[rank] for rank in own)])
            self._for_disks[leader] = pickle.dumps(metadata)
        own = self._disks.ranks_of(0)
        others = [share for rank, share in enumerate(results) if rank not in own]
        super().finish(metadata, [*others, *(results[rank] for rank in own)])

    def share_metadata(self, peers: Peers, what: str) -> None:
        """Hand the other disks' metadata to their leaders; every rank calls it."""
        if self._disks.are_one:
            return
        handed = peers.gather(self._for_disks)[0]

        def write() -> None:
            if peers.rank in handed:
                with (self._folder / METADATA).open("wb") as file:
                    file.write(handed[peers.rank])
                    flush(file)

        peers.agree(what, write)


class _HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.facts: dict[str, FileFacts] = {}
        self.fault: OSError | None = None
        """The first that a write met."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as file:
            stream = _HashingStream(file)
            try:
                yield stream
            finally:
                self.fault = self.fault or stream.fault
            self.facts[Path(path).name] = FileFacts(stream.length, stream.digest.hexdigest())


class _HashingStream(io.RawIOBase):
    """Passes what is written on to a file, and hashes it. Nothing is written twice: it cannot seek."""

    def __init__(self, file: io.IOBase) -> None:
        super().__init__()
        self._file: Any = file
        self.fault: OSError | None = None
        self.digest, self.length = hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            try:
                self._put(view)
            except OSError as error:
                self.fault = self.fault or error
                raise
            self.digest.update(view)
            self.length += len(view)
            return len(view)

    def _put(self, view: memoryview) -> None:
        self._file.write(view)

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        super().close()
        self._file.close()


def causes_of(error: dcp.api.CheckpointException) -> str:
    """What went wrong, once per rank that failed; DCP tells every rank of all of them."""
    lines: dict[str, int] = {}
    for rank, (cause, _) in sorted(error.failures.items(), reverse=True):
        lines[f"{cause}".strip().partition("\n")[0] or type(cause).__name__] = rank
    return "; ".join(f"rank {rank}: {line}" for line, rank in sorted(lines.items(), key=lambda one: one[1]))


def space_told(folder: Path) -> tuple[str, str]:
    """What to say of a disk before and after the reason why something could not be written there."""
    try:
        free = shutil.disk_usage(folder).free / 2**20
    except OSError:
        return "", ""
    return "no space is left; " if free < _FULL_MIB else "", f" ({free:,.0f} MiB are free there)"
