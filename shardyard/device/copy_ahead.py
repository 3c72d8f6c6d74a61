"""Copies between the host and an accelerator that run beside its computing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardyard.device.device import Device


@dataclass(frozen=True)
class Arrival:
    """A copy that is on its way."""

    tensor: torch.Tensor
    event: Any
    module: Any

    def wait(self) -> torch.Tensor:
        """The copy. What computes with it from now on waits for it on the device; this process does not."""
        stream = self.module.current_stream()
        stream.wait_event(self.event)
        self.tensor.record_stream(stream)  # or its memory could be taken again while it is read there
        return self.tensor


class CopyStream:
    """A stream of its own for copies; only those of pinned memory run beside the host too.

    Written for the streams that torch.cuda and torch.npu share; it was not run on either.
    """

    def __init__(self, device: Device) -> None:
        self._target, self._module = device.torch_device, device._module
        self._stream = self._module.Stream()

    def start(self, tensor: torch.Tensor) -> Arrival:
        """Begin to copy a tensor of the host."""
        with self._module.stream(self._stream):
            copied = tensor.to(self._target, non_blocking=True)
            return Arrival(copied, self._stream.record_event(), self._module)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy a tensor of the device into pinned memory: (the copy, the event of its end).

        Copies of one stream keep their order, so one back to the device may begin at once.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            return host, self._stream.record_event()

    def wait_for(self, events: Iterable[Any]) -> None:
        """What the device computes from now on begins after ``events``; this process does not wait."""
        for event in events:
            self._module.current_stream().wait_event(event)


def copy_stream(device: Device) -> CopyStream | None:
    """None on a CPU, whose tensors are where it computes."""
    return CopyStream(device) if device.is_accelerator else None
