"""What a run tells: the log, the line of a step and ``metrics.jsonl``."""

from shardyard.monitor.logs import log_run_start, setup_logging
from shardyard.monitor.metrics import METRICS_FILE, read_metrics
from shardyard.monitor.monitor import Monitor
from shardyard.monitor.record import CpuMemory, StepRecord, format_log_line

__all__ = [
    "METRICS_FILE",
    "CpuMemory",
    "Monitor",
    "StepRecord",
    "format_log_line",
    "log_run_start",
    "read_metrics",
    "setup_logging",
]
