"""The model for benchmarks: each rank has its own, or they share one that does not fit a device."""

from __future__ import annotations

import copy
from dataclasses import replace

from shardyard.device import Device, ProcessGroup
from shardyard.infer.model import Opened, open_model
from shardyard.infer.opening import Choice
from shardyard.models import Convert


def open_for_tasks(
    choice: Choice, group: ProcessGroup, device: Device, *, convert: Convert | None = None
) -> Opened:
    """The model on every rank; whole on each with ``parallel`` none or auto, so that they divide the work.

    Raises:
        UserError: as `open_model`.
    """
    if choice.parallel in ("tp", "fsdp"):
        return open_model(choice, group, device, convert=convert)
    alone = copy.copy(group)  # the same store and rank, so that what one rank makes is made once
    alone.world_size = 1
    return open_model(replace(choice, parallel="none"), alone, device, convert=convert)
