"""What autograd keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def saved_bytes(function: Callable[[], Any], but: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the storages that the graph of ``function()`` keeps, each once, those of ``but`` left out."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function()
    for tensor in but:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert outputs is not None  # the graph is alive until here, so no storage was used twice
    return sum(kept.values())
