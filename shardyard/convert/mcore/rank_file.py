"""One rank's ``model_optim_rng.pt``, written tensor by tensor: nothing ever holds the file's tensors at once.

``torch.save`` under ``skip_data`` lays the file out with holes where the tensors' bytes belong; the holes are
then filled through their offsets, and the checksums, which torch.save left at 0, are set as a plain
``torch.save`` sets them.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from shardyard.durable import remove_leftovers, sync, temporary_name
from shardyard.errors import UserError

Chunks = Mapping[str, Mapping[str, torch.Tensor]]
"""Per chunk (``model``, or ``model0``, ``model1``, ...) its tensors; meta tensors say shape and dtype."""

_DESCRIPTOR = b"PK\x07\x08"


class RankFile:
    """A file under a temporary name until it is complete.

    Used as a context: left in an error, the temporary file is removed.

    Raises:
        UserError: it cannot be written (disk full, no right, ...).
    """

    def __init__(self, path: Path, arguments: Namespace, chunks: Chunks) -> None:
        self.path = path
        self._planned = [
            (key, name, tensor) for key, tensors in chunks.items() for name, tensor in tensors.items()
        ]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
            self._temporary = temporary_name(path)
            self._lay_out(arguments, chunks)
            self._file = self._temporary.open("r+b")
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError for a full disk
            self._remove()
            raise UserError(f"{path} is not written: {error}") from error
        self._checksums: dict[str, int] = {}
        try:
            self._reserve()
            self._find_holes()
        except OSError as error:
            self._abandon()
            raise UserError(f"{path} is not written: {error}") from error

    def _lay_out(self, arguments: Namespace, chunks: Chunks) -> None:
        content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1}
        for key, tensors in chunks.items():
            # memory that is never touched, so it costs addresses only
            content[key] = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with torch.serialization.skip_data():
            torch.save(content, self._temporary, pickle_protocol=4)

    def _reserve(self) -> None:
        # a full disk is found now, not after hours
        size = os.fstat(self._file.fileno()).st_size
        os.posix_fallocate(self._file.fileno(), 0, size)

    def _find_holes(self) -> None:
        """Record ``data/N`` is the storage of the N-th tensor that was pickled."""
        with zipfile.ZipFile(self._temporary) as archive:
            entries = archive.infolist()
            directory = archive.start_dir
        self._holes: dict[tuple[str, str], tuple[int, int]] = {}
        self._records: dict[int, int] = {}
        number_of = {entry.filename.split("/", 1)[1]: entry for entry in entries}
        for number, (key, name, tensor) in enumerate(self._planned):
            entry = number_of[f"data/{number}"]
            if entry.file_size != tensor.numel() * tensor.element_size():
                raise AssertionError(f"{name}: torch.save stores tensors in another order than planned")
            self._holes[key, name] = (self._data_offset(entry.header_offset), entry.file_size)
        self._file.seek(directory)
        for entry in entries:  # where the directory keeps each record's checksum
            head = self._file.read(46)
            name_length, extra, comment = struct.unpack("<HHH", head[28:34])
            self._records[entry.header_offset] = self._file.tell() - 46 + 16
            self._file.seek(name_length + extra + comment, os.SEEK_CUR)
        self._entry_of = {
            (key, name): number_of[f"data/{number}"] for number, (key, name, _) in enumerate(self._planned)
        }

    def _data_offset(self, header: int) -> int:
        self._file.seek(header)
        name_length, extra = struct.unpack("<HH", self._file.read(30)[26:30])
        return header + 30 + name_length + extra

    def fill(self, chunk: str, name: str, tensor: torch.Tensor) -> int:
        """Write one tensor's bytes; their number is returned."""
        offset, size = self._holes.pop((chunk, name))
        flat = tensor.contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if size else memoryview(b"")
        if len(data) != size:
            raise AssertionError(f"{name} has {len(data)} bytes where {size} were planned")
        entry, checksum = self._entry_of[chunk, name], zlib.crc32(data)
        try:
            done = 0
            while done < size:
                done += os.pwrite(self._file.fileno(), data[done : done + (1 << 30)], offset + done)
            self._set_checksum(self._records[entry.header_offset], checksum)
            self._set_checksum_behind(offset + size, checksum)
        except OSError as error:
            raise UserError(f"{self.path} is not written: {error}") from error
        return size

    def _set_checksum(self, offset: int, checksum: int) -> None:
        os.pwrite(self._file.fileno(), struct.pack("<L", checksum), offset)

    def _set_checksum_behind(self, end: int, checksum: int) -> None:
        """A record's own checksum stands behind its bytes, as its length was not known before them."""
        if os.pread(self._file.fileno(), 4, end) == _DESCRIPTOR:
            self._set_checksum(end + 4, checksum)

    def finish(self) -> int:
        """Give the file its name, durably; its size is returned."""
        if self._holes:
            raise AssertionError(f"{len(self._holes)} tensors of {self.path} were not written")
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            size = self._temporary.stat().st_size
            self._temporary.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            raise UserError(f"{self.path} is not written: {error}") from error
        return size

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()

    def _abandon(self) -> None:
        self._file.close()
        self._remove()

    def _remove(self) -> None:
        if hasattr(self, "_temporary"):
            self._temporary.unlink(missing_ok=True)
