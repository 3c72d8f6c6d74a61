"""Where a step would wait for its device, found on a CPU: what is computed from parameters or batches counts
as a device's, and what reads such a tensor is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
}


class Waits(TorchDispatchMode):
    """Counts, by name, the reads of tensors that come from ``seeds``."""

    def __init__(self, seeds: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        # Kept alive, so that no other storage takes the place of one.
        self._device: dict[int, torch.UntypedStorage] = {}
        self._mark(seeds)

    def on_device(self, values: Any) -> bool:
        """Whether a tensor in ``values`` would be on the device."""
        return any(t.untyped_storage()._cdata in self._device for t in _tensors(values))

    def _mark(self, values: Any) -> None:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            self._device[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = self.on_device([args, kwargs])
        name = func.name().partition(".")[0] if hasattr(func, "name") else str(func)
        masked = name == "aten::index" and any(t.dtype is torch.bool for t in _tensors(args[1]))
        if touched and (name in _READS or masked):
            self.counts[name] += 1
        result = func(*args, **kwargs)
        if touched:
            self._mark([args, kwargs, result])
        return result

    def __enter__(self) -> Waits:
        self._own = {name: getattr(torch.Tensor, name) for name in ("cpu", "tolist", "numpy")}
        for name, method in self._own.items():
            setattr(torch.Tensor, name, self._watched(name, method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._own.items():
            setattr(torch.Tensor, name, method)

    def _watched(self, name: str, method: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.on_device(tensor):
                return method(tensor, *args, **kwargs)
            self.counts[name] += 1
            copy = torch.from_numpy(self._own["numpy"](tensor.detach()).copy())  # marked by no operator
            return copy if name == "cpu" else method(copy, *args, **kwargs)

        return read


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor):
            yield value.to_local() if isinstance(value, DTensor) else value
