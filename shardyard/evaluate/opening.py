"""The model for benchmarks: each rank has its own, or they share one that does not fit a device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardyard.device import Device, ProcessGroup
from shardyard.infer.model import Opened, open_model
from shardyard.infer.opening import Choice
from shardyard.models import Convert


class Alone(ProcessGroup):
    """A rank that asks no other, though there are some: the group of a model of its own."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 1)

    def gather(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor([list(numbers)], dtype=torch.float64)

    def gather_objects(self, value: object) -> list:
        return [value]


def open_for_tasks(
    choice: Choice, group: ProcessGroup, device: Device, *, convert: Convert | None = None
) -> Opened:
    """The model on every rank; whole on each with ``parallel`` none or auto, so that they divide the work.

    Raises:
        UserError: as `open_model`.
    """
    if choice.parallel in ("tp", "fsdp"):
        return open_model(choice, group, device, convert=convert)
    reader = copy.copy(group)  # the same store and rank, so that what one rank makes is made once
    reader.world_size = 1
    opened = open_model(replace(choice, parallel="none"), reader, device, convert=convert)
    return replace(opened, group=Alone())
