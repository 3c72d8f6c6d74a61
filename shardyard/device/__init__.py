"""The one room that knows cpu, cuda and npu."""

from shardyard.device.agreement import agree, agree_on_node
from shardyard.device.copy_ahead import Arrival, CopyStream, copy_stream
from shardyard.device.device import Device, detect_device, local_ranks, visible_accelerators
from shardyard.device.passing_thread import in_passing_thread
from shardyard.device.process_group import ProcessGroup, start_process_group
from shardyard.device.read_back import read_back
from shardyard.device.restart import restarted_since
from shardyard.device.stop_signal import StopSignal, note_saved, stop_asked

__all__ = [
    "Arrival",
    "CopyStream",
    "Device",
    "ProcessGroup",
    "StopSignal",
    "agree",
    "agree_on_node",
    "copy_stream",
    "detect_device",
    "in_passing_thread",
    "local_ranks",
    "note_saved",
    "read_back",
    "restarted_since",
    "start_process_group",
    "stop_asked",
    "visible_accelerators",
]
