"""Stochastic rounding from fp32 to bf16 whose draws depend on an element and not on who holds it.

A number between two neighbours of bf16 goes to the upper one with a probability equal to its distance from
the lower one, so that its expected value is the number itself, and many small changes add up that rounding to
the nearest would lose. What is drawn for an element is a hash of the run's seed, the update, the tensor's
name and the element's place in the whole tensor: the same on any layout and after a resume, without a state.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Of the 32-bit mixer "lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018), as int32."""
_LOW = 0xFFFF


def key_of(seed: int, update: int, name: str) -> int:
    """What tells the draws of one update of one tensor from all others; int32."""
    digest = hashlib.blake2b(f"{seed}/{update}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


class Places:
    """The places in the whole tensor of the elements that this rank holds, in the order of its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
        whole = shape
        if isinstance(tensor, DTensor):
            found = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
            shape, offset = (tuple(map(int, numbers)) for numbers in found)
        self._shape = shape
        self._strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
        self._start = sum(o * stride for o, stride in zip(offset, self._strides, strict=True))
        self._in_a_row = shape[1:] == whole[1:]
        """Whole rows lie one behind the other."""

    def of(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Those of the elements ``begin`` to ``end`` of this rank, modulo 2**32; int32."""
        if self._in_a_row:
            places = torch.arange(self._start + begin, self._start + end, device=device)
        else:
            left = torch.arange(begin, end, device=device)
            places = torch.full_like(left, self._start)
            for length, stride in zip(reversed(self._shape), reversed(self._strides), strict=True):
                places += left.remainder(length) * stride
                left = left.div(length, rounding_mode="floor")
        return places.to(torch.int32)


def mix_(values: torch.Tensor) -> torch.Tensor:
    """Each int32 in place by its hash, a bijection whose every bit depends on all bits of the input."""
    first, second = _MULTIPLIERS
    values.bitwise_xor_((values >> 16).bitwise_and_(_LOW)).mul_(first)
    values.bitwise_xor_((values >> 15).bitwise_and_(0x1FFFF)).mul_(second)
    return values.bitwise_xor_((values >> 16).bitwise_and_(_LOW))


def draws(places: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two draws from 0 to 65535 for each of ``places``, which are overwritten; int32."""
    mixed = mix_(places.bitwise_xor_(key))
    return (mixed >> 16).bitwise_and_(_LOW), mixed.bitwise_and_(_LOW)


def round_into(target: torch.Tensor, values: torch.Tensor, drawn: torch.Tensor) -> None:
    """Round fp32 ``values`` into bf16 ``target``, up in magnitude where the 16 bits that bf16 lacks and
    ``drawn`` carry over; ``drawn`` is overwritten.
    """
    drawn.add_(values.view(torch.int32)).bitwise_and_(~_LOW)
    target.copy_(drawn.view(torch.float32))
