"""A set of safetensors files that is planned before a byte of it is written.

`plan_files` says which tensor lies in which file at which offset, from names, shapes and dtypes alone.
`FileWriter` makes one file with its header at its full size, under whatever name the caller gives it, takes
tensors or contiguous parts of them in any order, and reads all of it again before it calls the file done.
Nothing here knows of ranks.

The format: 8 bytes, the header's length, little-endian; the header, JSON padded with blanks to a multiple of
8; then the tensors without a gap (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardyard.errors import UserError

Facts = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a whole tensor."""

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""The format's name of each dtype that is read and written."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 23
"""Bytes that are read again at a time."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in its file, from byte ``offset``, ``size`` bytes."""

    file: int
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PlannedFile:
    """One file: its final name, its head (length and header) and where its tensors lie."""

    name: str
    head: bytes
    places: Mapping[str, Place]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.head) + sum(place.size for place in self.places.values())


@dataclass(frozen=True)
class FilePlan:
    """All files of a model, in order."""

    files: tuple[PlannedFile, ...]

    @cached_property
    def places(self) -> dict[str, Place]:
        """Every tensor of every file."""
        return {name: place for file in self.files for name, place in file.places.items()}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as an index states it: without the headers."""
        return sum(place.size for place in self.places.values())

    def index(self) -> str | None:
        """The text of the index; None where there is one file, which needs none."""
        if len(self.files) == 1:
            return None
        weight_map = {name: self.files[place.file].name for name, place in self.places.items()}
        index = {
            "metadata": {"total_size": self.total_size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(index, indent=2) + "\n"


def plan_files(facts: Mapping[str, Facts], shard_bytes: float) -> FilePlan:
    """Spread tensors over files of at most ``shard_bytes`` each, in the order of ``facts``.

    A tensor that is larger has a file of its own. Within a file wide dtypes come first, so that every tensor
    starts at a multiple of its item size.

    Raises:
        UserError: a dtype that the format does not have.
    """
    groups: list[dict[str, Facts]] = [{}]
    filled = 0
    for name, (shape, dtype) in facts.items():
        if dtype not in _NAMES:
            raise UserError(f"{name} is {dtype}, which a safetensors file cannot hold")
        size = _size(shape, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = (shape, dtype)
        filled += size
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [shard_name(n, count) for n in range(count)]
    pairs = zip(names, groups, strict=True)
    return FilePlan(tuple(_planned(number, *pair) for number, pair in enumerate(pairs)))


def shard_name(number: int, count: int) -> str:
    """The name of file ``number``, from 0, of ``count``."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _planned(number: int, name: str, group: dict[str, Facts]) -> PlannedFile:
    ordered = sorted(group, key=lambda key: -group[key][1].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, tuple[int, int]] = {}
    position = 0
    for key in ordered:
        shape, dtype = group[key]
        ends[key] = (position, position := position + _size(shape, dtype))
        header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": list(ends[key])}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    places = {
        key: Place(number, len(head) + start, end - start, *group[key]) for key, (start, end) in ends.items()
    }
    return PlannedFile(name, head, places)


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * dtype.itemsize


class FileWriter:
    """Writes one planned file at ``path``, which must not exist; `finish` makes it durable and checks it.

    As a context manager it closes the file on the way out of an error, and leaves removing it to the caller.
    """

    def __init__(self, file: PlannedFile, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be made at its size.
        """
        self.file, self.path = file, path
        self._pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in file.places}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(self._descriptor, file.size)
            self._put(memoryview(file.head), 0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, name: str, data: torch.Tensor, start: int = 0) -> None:
        """Write ``data``, a tensor on the host, as the bytes of ``name`` from byte ``start`` of it on.

        ``data`` is the whole tensor or any part of it that is contiguous in its row-major order.

        Raises:
            OSError: it cannot be written (no space left).
            ValueError: another dtype than planned, or more bytes than the tensor has.
        """
        place = self.file.places[name]
        if data.dtype != place.dtype or start + data.nbytes > place.size:
            raise ValueError(f"{name}: {data.nbytes} bytes of {data.dtype} from {start} do not fit {place}")
        view = bytes_of(data)
        self._put(view, place.offset + start)
        self._pieces[name].append((start, len(view), zlib.crc32(view)))

    def finish(self) -> None:
        """Make the file durable, open it again as any reader would and compare it with what was written.

        Raises:
            OSError: it cannot be written or read.
            RuntimeError: a part of a tensor was never written, or was written twice.
            UserError: the file does not hold what was written to it.
        """
        for name, place in self.file.places.items():
            self._check_covered(name, place.size)
        os.fsync(self._descriptor)
        check_header(self.path, self.file)
        for name, place in self.file.places.items():
            for start, size, checksum in self._pieces[name]:
                if self._checksum(place.offset + start, size) != checksum:
                    raise UserError(f"{self.path}: {name} does not come back as it was written")
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _put(self, view: memoryview, offset: int) -> None:
        while view:  # one call writes 2 GiB at most
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def _check_covered(self, name: str, size: int) -> None:
        position = 0
        for start, length, _ in sorted(self._pieces[name]):
            if start != position:
                break
            position += length
        if position != size:
            raise RuntimeError(f"{self.path}: {name} was not written once and whole: {self._pieces[name]}")

    def _checksum(self, offset: int, size: int) -> int:
        checksum, end = 0, offset + size
        while offset < end:
            data = os.pread(self._descriptor, min(_CHUNK, end - offset), offset)
            if not data:
                raise OSError(f"{self.path} ends at byte {offset}")
            checksum, offset = zlib.crc32(data, checksum), offset + len(data)
        return checksum


def check_header(path: Path, file: PlannedFile) -> None:
    """Open a file with the safetensors library: names, shapes and dtypes are the planned ones.

    Raises:
        UserError: they are not, or it is no such file.
    """
    try:
        found = dict(facts_of_file(path))
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read back: {error}") from error
    wanted = {name: (place.shape, place.dtype) for name, place in file.places.items()}
    if found.keys() != wanted.keys():
        raise UserError(f"{path} does not hold the tensors that were written to it")
    for name, facts in wanted.items():
        if found[name] != facts:
            raise UserError(f"{path}: {name} came back as {found[name]}, not {facts}")


def facts_of_file(path: Path) -> Iterator[tuple[str, Facts]]:
    """Name, shape and dtype of each tensor in a safetensors file, whose data is not read.

    Raises:
        UserError: a dtype that is not in `DTYPES`.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (safe_open has no __iter__)
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise UserError(f"{path}: {name} is {part.get_dtype()}, a dtype that is not exported")
            yield name, (tuple(part.get_shape()), DTYPES[part.get_dtype()])


def facts_of_folder(folder: Path) -> dict[str, Facts]:
    """The same of all files of a folder that are named ``*.safetensors``."""
    paths: Iterable[Path] = sorted(folder.glob("*.safetensors"))
    return {name: facts for path in paths for name, facts in facts_of_file(path)}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy where it is contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
