"""The bytes of tensors that are alive: at the peak of a block, and of what a model and its optimizer keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def bytes_kept(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind these tensors' local parts, each counted once, padding included."""
    locals_ = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = {s.data_ptr(): s.nbytes() for t in locals_ if (s := t.untyped_storage()).nbytes()}
    return sum(storages.values())


class LivePeak(TorchDispatchMode):
    """The most bytes alive at once in storages that came to be inside the block, at operations' ends.

    One that is resized, as FSDP does to free and fill what it gathers, counts with its size at the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {value.untyped_storage()._cdata for value in _plain([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for value in _plain(result):
            if value.untyped_storage()._cdata not in before:  # else a view, or written in place
                reference = StorageWeakRef(value.untyped_storage())
                self._alive[reference.cdata] = reference
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive at this moment."""
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._alive)
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _plain(values: Any) -> Iterable[torch.Tensor]:
    return (v for v in tree_iter(values) if isinstance(v, torch.Tensor) and not isinstance(v, DTensor))
