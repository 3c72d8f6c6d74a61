"""What every conversion passes on: the weights of one model under the names that Hugging Face files use.

A reader opens a folder of some format as `Weights`; a writer takes `Weights` and makes a folder of another.
Names, shapes and dtypes are known before the first tensor is read, so files are planned first and then
filled one tensor at a time; nothing ever holds a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from shardyard.errors import UserError

Facts = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a whole tensor."""


class Weights(Protocol):
    """The tensors of one model, by the names of Hugging Face files: experts one by one, tied ones once.

    A reader is picklable: worker processes open files for themselves.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json of the model."""
        ...

    @property
    def facts(self) -> Mapping[str, Facts]:
        """All names, in the order in which they are read best: the embedding, layer 0, 1, ..., norm, head."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the host, contiguous, as stored.

        Raises:
            UserError: its file is missing, damaged or not what its header says.
        """
        ...


class CastWeights:
    """Other weights with their floating tensors in ``dtype``; ``kept`` names stay as they are.

    ``read`` raises UserError for a finite value that ``dtype`` cannot hold.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, kept: Iterable[str] = ()) -> None:
        self.source = weights
        self.folder = weights.folder
        self.dtype = dtype
        self.kept = frozenset(kept)
        self.config = with_dtype(weights.config, dtype)
        self.facts: dict[str, Facts] = {
            name: (shape, dtype if self._casts(name, found) else found)
            for name, (shape, found) in weights.facts.items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        if not self._casts(name, tensor.dtype) or tensor.dtype == self.dtype:
            return tensor
        cast = tensor.to(self.dtype)
        if bool((torch.isinf(cast) & torch.isfinite(tensor)).any()):
            raise UserError(
                f"{self.source.folder}: {name} holds values up to {float(tensor.abs().max()):.4g}, which "
                f"{plain_name(self.dtype)} (up to {torch.finfo(self.dtype).max:.4g}) cannot hold; choose "
                "another --dtype"
            )
        return cast

    def _casts(self, name: str, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and name not in self.kept


class WithConfig:
    """The same weights with another config.json."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.source, self.config = weights, config
        self.folder, self.facts = weights.folder, weights.facts

    def read(self, name: str) -> torch.Tensor:
        return self.source.read(name)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that states ``dtype``, in its place and under the name that it has there."""
    stated = {key: plain_name(dtype) for key in ("dtype", "torch_dtype") if key in config}
    return {**config, **(stated or {"dtype": plain_name(dtype)})}


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the weights that a config.json states; None where it states none."""
    for part in (config, config.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        found = getattr(torch, str(name).removeprefix("torch."), None) if name else None
        if isinstance(found, torch.dtype):
            return found
    return None


def config_of(weights: Weights) -> dict[str, Any]:
    """config.json of a folder that holds ``weights``: it states the dtype that most bytes have."""
    counts: dict[torch.dtype, int] = {}
    for facts in weights.facts.values():
        if facts[1].is_floating_point:
            counts[facts[1]] = counts.get(facts[1], 0) + size_of(facts)
    main = max(counts, key=lambda dtype: counts[dtype], default=None)
    if main is None or config_dtype(weights.config) == main:
        return dict(weights.config)
    return with_dtype(weights.config, main)


def plain_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def size_of(facts: Facts) -> int:
    """Bytes of a tensor."""
    shape, dtype = facts
    return math.prod(shape) * dtype.itemsize


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bytes: NaN is itself, and 0 is not -0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def total_bytes(weights: Weights) -> int:
    """Bytes of all tensors."""
    return sum(map(size_of, weights.facts.values()))


def reading_order(names: Iterable[str]) -> list[str]:
    """Names in the order of a forward: embeddings, layers by their number, norm, head."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Numbers of a name compare as numbers."""
    parts = name.split(".")
    natural = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
    if any(part.isdigit() for part in parts):
        return 1, natural
    if re.search(r"embed|wte|wpe", name):
        return 0, natural
    return (3 if re.search(r"lm_head|output", name) else 2), natural
