"""The tensors in the weight files of a folder, by name, each read by the slice that a rank asks for.

Nothing is read when a folder is opened but the headers of safetensors files and the table of contents of
torch's, which load as tensors only, so they cannot run code.

Slices are read, not mapped. safetensors maps a file, and then Linux maps more than was touched (16 pages at
least, since 6.16 up to 2 MiB), parameters can be views of a file that someone rewrites, and a file cut short
ends the process; its reader without a mapping reads whole tensors for every slice of them.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from shardyard.errors import UserError, first_line

_KEY = "model.model_name_or_path"
# In the order of preference; of several patterns the first that finds anything counts.
_PATTERNS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model*.bin",
    "*.pt",
)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_OTHER_FILES = ("adapter_model", "optimizer", "scheduler", "rng_state", "training_args")


class Slices(Protocol):
    """A tensor of a file; indexing it with slices reads that part."""

    def get_shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class WeightFiles:
    """The weight files of ``folder``, open; a context manager.

    Raises:
        UserError: a file that an index names is missing, or one is damaged or holds anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = weight_files(folder)
        self._open = ExitStack()
        self.tensors: dict[str, Slices | torch.Tensor] = {}
        try:
            for path in self.paths:
                self.tensors.update(self._tensors_of(path))
        except BaseException:
            self._open.close()
            raise

    def _tensors_of(self, path: Path) -> Mapping[str, Slices | torch.Tensor]:
        if path.suffix != ".safetensors":
            return _torch_file(path)
        try:
            with safe_open(path, framework="pt"):  # checks the header against the file
                pass
            descriptor = os.open(path, os.O_RDONLY)
            self._open.callback(os.close, descriptor)
            return _safetensors_file(path, descriptor)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{_KEY}: {path} is no complete safetensors file: {error}") from error

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.tensors.clear()
        self._open.close()


class FileTensor:
    """A tensor in a safetensors file; indexing it reads that part, run by run, into memory of its own."""

    def __init__(
        self, path: Path, descriptor: int, at: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._path, self._descriptor, self._at = path, descriptor, at
        self._shape, self.dtype = tuple(shape), dtype

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part that slices of step 1 (or ``...``) name; OSError when the file ends before it."""
        cuts = cuts_of(index, self._shape)
        part = torch.empty([max(cut.stop - cut.start, 0) for cut in cuts], dtype=self.dtype)
        if not part.numel():
            return part
        strides, run = [1] * len(cuts), 1
        for dim in reversed(range(len(cuts) - 1)):
            strides[dim] = strides[dim + 1] * self._shape[dim + 1]
        outer = len(cuts)  # dimensions from here on lie in the file as they do in ``part``
        while outer and run == strides[outer - 1]:
            outer -= 1
            run *= part.shape[outer]
        first = sum(cut.start * stride for cut, stride in zip(cuts, strides, strict=True))
        into = part.reshape(-1).view(torch.uint8).numpy().data
        length = run * part.element_size()
        for number, place in enumerate(itertools.product(*(range(size) for size in part.shape[:outer]))):
            at = first + sum(step * stride for step, stride in zip(place, strides[:outer], strict=True))
            self._read(into[number * length : (number + 1) * length], self._at + at * part.element_size())
        return part

    def _read(self, into: memoryview, at: int) -> None:
        while len(into):
            count = os.preadv(self._descriptor, [into], at)
            if count == 0:
                raise OSError(f"{self._path} ends at byte {at}, inside a tensor")
            into, at = into[count:], at + count


def cuts_of(index: Any, shape: Sequence[int]) -> list[slice]:
    """One slice per dimension of ``shape``, with both ends, of an index of slices or ``...``."""
    given: tuple[slice, ...] = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    cuts = [slice(*part.indices(size)[:2]) for part, size in zip(given, shape, strict=False)]
    return cuts + [slice(0, size) for size in shape[len(cuts) :]]


def _safetensors_file(path: Path, descriptor: int) -> Mapping[str, FileTensor]:
    """By the header: its length in 8 bytes, then JSON with dtype, shape and place of each tensor."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    with path.open("rb") as file:
        file.seek(8)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, facts in header.items():
        if facts["dtype"] not in _DTYPES:
            raise UserError(f"{_KEY}: {path}: {name} is {facts['dtype']}, a dtype that is not read here")
        at = 8 + length + facts["data_offsets"][0]
        found[name] = FileTensor(path, descriptor, at, facts["shape"], _DTYPES[facts["dtype"]])
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face model folder; none where it holds no weights.

    Raises:
        UserError: an index that cannot be read, or one that names a file which is not there.
    """
    for pattern in _PATTERNS:
        found = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(_OTHER_FILES)]
        if found:
            return _indexed(found[0]) if pattern.endswith(".json") else found
    return []


def _indexed(index: Path) -> list[Path]:
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{_KEY}: {index} is no index of weight files: {error!r}") from error
    paths = [index.parent / str(name) for name in sorted(named)]
    for path in paths:
        if path.parent != index.parent or not path.is_file():
            raise UserError(f"{_KEY}: {index} names {path.name}, which is not beside it")
    return paths


def _torch_file(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a file that torch.save wrote, mapped where its format allows that."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        cause = next((line for line in str(error).splitlines() if "GLOBAL" in line), "it is no such file")
        raise UserError(
            f"{_KEY}: {path} is not read: it holds more than tensors, and loading it could run code "
            f"({cause.strip()}). Take the model's safetensors files"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        cause = first_line(error)
        raise UserError(f"{_KEY}: {path} cannot be read: {cause}") from error
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise UserError(f"{_KEY}: {path} is no mapping of names to tensors")
    return loaded
