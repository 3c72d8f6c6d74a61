"""Whether a launcher has started this run before, as part of the same launch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

START, LAUNCHED = "SHARDYARD_START", "SHARDYARD_LAUNCHED"
"""Set by ``shardyard train``: the number of this start, from 0; when the launch began (seconds, epoch)."""


def restarted_since(environ: Mapping[str, str] | None = None) -> float | None:
    """When the launch of this rank began (seconds since the epoch), if an earlier start of it has failed.

    None in the first start: what lies in the run's folder then is older than the launch.
    """
    environ = os.environ if environ is None else environ
    if int(environ.get(START, "0")) > 0:
        return float(environ[LAUNCHED])
    if int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return _start_of(os.getppid())
    return None


def _start_of(pid: int) -> float | None:
    """When a process began, from /proc; None where there is none."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
