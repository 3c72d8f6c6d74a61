"""Selective recomputation: outputs of expensive operators are kept, by operator and in their order.

torch's own selective checkpoint asks that forward and recomputation run the same operators throughout. Under
FSDP they do not: what a unit inside a recomputed module gathers, and when, depends on prefetching. Here only
the kept operators are counted; every other one may run as often as it likes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("aten.mm", "aten.addmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "torch_attn._varlen_attn",
        "flash_attn._flash_attn_varlen_forward",
        "npu.npu_fusion_attention",
    ),
    "experts": ("aten._grouped_mm", "aten._scaled_grouped_mm", "npu.npu_grouped_matmul"),
}
"""Names of the config -> operators of torch that they stand for. Batched products (``bmm``) are in none:
plain attention makes its scores with them, which are the largest tensors of all.
"""

Kept = dict[Any, "deque[Any]"]


def kept_operators(again: Collection[str]) -> frozenset[Any]:
    """The operators whose outputs are kept, but for the kinds named in ``again``; those this machine has."""
    found = set()
    for kind, names in _NAMES.items():
        if kind in again:
            continue
        for name in names:
            library, operator = name.split(".")
            packet = getattr(getattr(torch.ops, library), operator, None)
            if packet is not None:
                found.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(found)


def keep_and_reuse(operators: frozenset[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of a forward and of its recomputation, for ``torch.utils.checkpoint``."""
    kept: Kept = defaultdict(deque)
    return _Keep(operators, kept), _Reuse(operators, kept)


class _Mode(TorchDispatchMode):
    def __init__(self, operators: frozenset[Any], kept: Kept) -> None:
        super().__init__()
        self._operators, self._kept = operators, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside stays compiled: it is one operator to these modes."""
        return True

    def _is_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return func in self._operators and not _draws(func, args, kwargs)


class _Keep(_Mode):
    """Of a forward: what the operators give is remembered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._is_kept(func, args, kwargs):
            self._kept[func].append(tree_map_only(torch.Tensor, _Remembered, output))
        return output


class _Reuse(_Mode):
    """Of a recomputation: the same operators give what they gave, once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        if not self._kept[func]:
            raise RuntimeError(
                f"{func} runs more often in the recomputation than in the forward: its module depends on "
                "more than what enters it; give its pattern mode: full in parallel.recompute_modules"
            )
        return tree_map_only(_Remembered, _Remembered.tensor, self._kept[func].popleft())


class _Remembered:
    """A tensor apart from its graph, which would keep alive what is to be dropped."""

    def __init__(self, output: torch.Tensor) -> None:
        # Below autograd a detached tensor counts its changes apart, unless views are tracked here.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # pyright: ignore[reportAttributeAccessIssue]
            self._output = output.detach()
        self._version = self._output._version

    def tensor(self) -> torch.Tensor:
        if self._output._version != self._version:
            raise RuntimeError(
                "an output that selective recomputation keeps was changed in place afterwards; name its kind "
                "in parallel.recompute_operators (linear, attention, experts), so that it is computed again"
            )
        return self._output


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the operator drops out: skipped, it would leave the generator where it was for the next."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    for place, argument in enumerate(schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return False
