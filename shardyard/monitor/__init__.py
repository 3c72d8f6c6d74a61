"""What a run tells: the log, the line of a step and ``metrics.jsonl``."""

from shardyard.monitor.logs import log_run_start, setup_logging
from shardyard.monitor.metrics import METRICS_FILE, read_metrics, read_validations
from shardyard.monitor.monitor import Monitor
from shardyard.monitor.record import CpuMemory, StepRecord, format_log_line
from shardyard.monitor.validation import ALL_SETS, EvalResult, EvalScore

__all__ = [
    "ALL_SETS",
    "METRICS_FILE",
    "CpuMemory",
    "EvalResult",
    "EvalScore",
    "Monitor",
    "StepRecord",
    "format_log_line",
    "log_run_start",
    "read_metrics",
    "read_validations",
    "setup_logging",
]
