"""The tensors in the weight files of a folder, by name, each read by the slice that a rank asks for.

Nothing is read when a folder is opened but the headers of safetensors files (which are mapped) and the table
of contents of torch's (which load as tensors only, so they cannot run code).
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from shardyard.errors import UserError

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
            file: Any = self._open.enter_context(safe_open(path, framework="pt", backend="mmap"))
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (no __iter__)
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
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{_KEY}: {path} cannot be read: {cause}") from error
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise UserError(f"{_KEY}: {path} is no mapping of names to tensors")
    return loaded
