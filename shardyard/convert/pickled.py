"""Weights in a pickle (pytorch_model.bin, .pt): read as tensors only, whatever else the file would do."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from shardyard.convert.weights import Facts
from shardyard.errors import UserError


class PickledFile:
    """The tensors of a file by name; mapped, where it is of torch's zip format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, torch.Tensor] | None = None
        self.facts: dict[str, Facts] = {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._load().items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self._load()[name].detach().clone(memory_format=torch.contiguous_format)

    def _load(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = _load(self.path)
        return self._tensors

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": None}


def cause_of(error: Exception) -> str:
    """Why torch did not read a pickle, in few words: its own text proposes to run what the file holds."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return f"it names {named[1]}, which is no tensor"
    first = (str(error).strip().splitlines() or [""])[0]
    if "weights_only" in str(error) or not first:
        return "it holds more than tensors, or is damaged"
    return f"it is damaged ({first:.200})"


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        with warnings.catch_warnings():  # that a pickle is of another protocol than torch's own
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # of every type: whatever a damaged or hostile pickle leads to
        raise UserError(f"{path} is not read: {cause_of(error)}; only files of plain tensors are") from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{path} is not read: it is no mapping of names to tensors")
    return {str(name): tensor for name, tensor in found.items()}
