"""The one room that knows cpu, cuda and npu."""

from shardyard.device.device import Device, detect_device, local_ranks, visible_accelerators
from shardyard.device.process_group import ProcessGroup, start_process_group
from shardyard.device.restart import restarted_since

__all__ = [
    "Device",
    "ProcessGroup",
    "detect_device",
    "local_ranks",
    "restarted_since",
    "start_process_group",
    "visible_accelerators",
]
