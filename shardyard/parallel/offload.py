"""What the backward pass needs of a block goes to the host's memory and comes back when its turn is near.

Autograd's hooks on saved tensors hand over each tensor that a block keeps. Storages are copied, not tensors:
one that several operators keep travels once and comes back with all its views. Parameters stay, for FSDP
frees and gathers them itself, and so does what the block shares with others (positions, masks). When the
backward enters a block, the copies of the block before it start too. Under recompute a block keeps what
enters it, and that is what travels.

On an accelerator copies run on a stream of their own (device/copy_ahead.py; not run on one yet). On a CPU
they are real copies too, so that the same code is tested; they gain nothing there.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_iter

from shardyard.config import ParallelConfig
from shardyard.device import CopyStream, Device, copy_stream
from shardyard.parallel.blocks import select_blocks
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local

logger = logging.getLogger("shardyard.parallel")

SMALLEST = 1 << 10
"""Bytes of a storage that is worth a copy."""


def apply_offload(model: nn.Module, parallel: ParallelConfig, meshes: Meshes, device: Device) -> None:
    """Let each matched block keep its saved tensors on the host; after recompute, so that it is outside.

    The last block is left alone, whose backward comes at once, but not in a pipeline, where others' forwards
    come between.

    Raises:
        UserError: the patterns match nothing.
    """
    if not parallel.activation_offload:
        return
    if not device.is_accelerator:
        logger.warning("parallel.activation_offload: on a CPU activations are on the host; it only costs")
    blocks = select_blocks(model, parallel, "activation_offload_modules")
    chain = Chain(copy_stream(device))
    for index, (_, module) in enumerate(blocks if meshes.layout.pp > 1 else blocks[:-1]):
        module.forward = functools.partial(_offloaded, module.forward, chain, index, module)


def _offloaded(forward: Any, chain: Chain, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # What a block gets beside its hidden states, others get as well.
    shared = [args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}]
    keeping = _Keeping(chain, chain.begin(index), module, shared)
    with torch.autograd.graph.saved_tensors_hooks(keeping.pack, unpack):
        outputs = forward(*args, **kwargs)
    keeping.end()
    return outputs


class Chain:
    """The blocks of one model in the order in which their forwards run."""

    def __init__(self, copies: CopyStream | None) -> None:
        self.copies = copies
        self._last: tuple[int, weakref.ref[Record]] | None = None

    def begin(self, index: int) -> Record:
        """The record of a forward of block ``index``; a new chain when blocks begin anew."""
        before = self._last[1]() if self._last is not None and self._last[0] <= index else None
        record = Record(self.copies, before)
        self._last = index, weakref.ref(record)
        return record


class Record:
    """What one forward of a block keeps on the host."""

    def __init__(self, copies: CopyStream | None, before: Record | None) -> None:
        self.copies, self._before = copies, before and weakref.ref(before)
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()

    @property
    def before(self) -> Record | None:
        """That of the block before; None if there is none, or nothing needs it any more."""
        return self._before() if self._before else None

    def start(self) -> None:
        """Begin to bring everything back; no harm when it is on its way already."""
        for entry in self.entries:
            entry.start()


class Entry:
    """A storage on the host, and its copy on the device while somebody needs it."""

    def __init__(self, record: Record, flat: torch.Tensor) -> None:
        self.record, self.uses = record, 0
        self._arrival: Any = None
        self._home = flat.device
        if record.copies is None:
            self.host, self.departure = flat.clone(), None
        else:
            self.host, self.departure = record.copies.to_host(flat)
        record.entries.add(self)

    def start(self) -> None:
        if self._arrival is None:
            copies = self.record.copies
            self._arrival = self.host.clone() if copies is None else copies.start(self.host)

    def take(self) -> torch.UntypedStorage:
        """The storage on the device, which is let go once each of its views has been taken."""
        self.start()
        arrived = self._arrival
        self.uses -= 1
        if self.uses == 0:
            self._arrival = None
        return (arrived if isinstance(arrived, torch.Tensor) else arrived.wait()).untyped_storage()


@dataclass(frozen=True)
class View:
    """A saved tensor: its place in a storage."""

    entry: Entry
    dtype: torch.dtype
    device: torch.device
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Keeping:
    """The hook of one forward of a block."""

    def __init__(self, chain: Chain, record: Record, module: nn.Module, shared: Any) -> None:
        self._record, self._module, self._previous = record, module, record.before
        self._staying = {_place(value) for value in tree_iter(shared) if isinstance(value, torch.Tensor)}
        self._nested = any(isinstance(m, FSDPModule) for m in module.modules() if m is not module)
        self._parameters = set(_places_of_parameters(module))
        # Sources stay alive until the end of the forward, so that a place means one storage.
        self._found: dict[tuple[int, int], tuple[Entry, torch.Tensor]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """A `View` of what travels, or the tensor itself."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or not self._travels(tensor):
            return tensor
        key = _place(tensor), tensor._version
        if key not in self._found:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._found[key] = Entry(self._record, flat), tensor
        entry = self._found[key][0]
        entry.uses += 1
        offset = int(tensor.storage_offset())
        return View(entry, tensor.dtype, tensor.device, offset, tensor.size(), tensor.stride())

    def _travels(self, tensor: torch.Tensor) -> bool:
        place = _place(tensor)
        if tensor.untyped_storage().nbytes() < SMALLEST or place in self._staying | self._parameters:
            return False
        if self._nested:  # units inside gather their parameters while the block runs
            self._parameters.update(_places_of_parameters(self._module))
        return place not in self._parameters

    def end(self) -> None:
        """Let go of what has been copied. The device goes on once the copies of the block before are done, so
        that no more than two blocks wait for theirs.
        """
        self._found.clear()
        if self._record.copies is not None and self._previous is not None:
            self._record.copies.wait_for(entry.departure for entry in self._previous.entries)


def unpack(kept: Any) -> torch.Tensor:
    """What `_Keeping.pack` was given."""
    if not isinstance(kept, View):
        return kept
    record = kept.entry.record
    record.start()
    if record.before is not None:
        record.before.start()
    tensor = torch.empty(0, dtype=kept.dtype, device=kept.device)
    return tensor.set_(kept.entry.take(), kept.offset, kept.size, kept.stride)


def _place(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _places_of_parameters(module: nn.Module) -> Iterator[int]:
    with torch.no_grad():
        yield from (_place(parameter) for parameter in module.parameters())
