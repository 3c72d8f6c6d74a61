"""What a safetensors file says of itself: an 8-byte length, a JSON table, then the tensors' bytes.

Files are read with plain reads at the offsets of the table. Mapped files would do as well, but their pages
count as the process's memory while nobody else needs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint.hf_files import DTYPES, bytes_of
from shardyard.convert.weights import Facts, size_of
from shardyard.errors import UserError

_LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``offset`` is counted from the start of the file."""

    path: Path
    offset: int
    facts: Facts


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of a safetensors file.

    Raises:
        UserError: it is missing, cut short, or its table does not fit its size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{path} is no safetensors file, or is cut short: it has {size} bytes")
            table = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: its header is no JSON ({error})") from error
    if not isinstance(table, dict):
        raise UserError(f"{path} is damaged: its header is no table of tensors")
    begin = 8 + length
    return {
        name: _place(path, name, row, begin, size) for name, row in table.items() if name != "__metadata__"
    }


def _place(path: Path, name: str, row: Any, begin: int, size: int) -> Place:
    try:
        dtype = DTYPES.get(row["dtype"])
        shape = tuple(int(n) for n in row["shape"])
        first, last = (int(n) for n in row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: its header does not describe {name}") from error
    if dtype is None:
        raise UserError(f"{path}: {name} is {row['dtype']}, a dtype that is not converted")
    if min(shape, default=0) < 0 or first < 0 or last - first != size_of((shape, dtype)):
        raise UserError(f"{path} is damaged: {name} {list(shape)} {row['dtype']} has {last - first} bytes")
    if begin + last > size:
        raise UserError(f"{path} is cut short: {name} ends at byte {begin + last}, the file at {size}")
    return Place(path, begin + first, (shape, dtype))


def read_tensor(place: Place, name: str) -> torch.Tensor:
    """The tensor at ``place``, in memory of its own.

    Raises:
        UserError: the file has gone, or has become shorter.
    """
    shape, dtype = place.facts
    count = size_of(place.facts)
    flat = torch.empty(count, dtype=torch.uint8)
    view, done = bytes_of(flat), 0
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset)
            while done < count and (got := file.readinto(view[done:])):
                done += got
    except OSError as error:
        raise UserError(f"{place.path}: {name} cannot be read: {error.strerror}") from error
    if done < count:
        raise UserError(f"{place.path} is cut short: {name} has {done} of {count} bytes")
    return flat.view(dtype).reshape(shape)
