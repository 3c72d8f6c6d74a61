"""A peer library in a process of its own, so that nothing that importing it does is seen here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def ask(script: str, jobs: list[dict[str, Any]], folder: Path) -> dict[str, np.ndarray]:
    """The arrays that ``script`` answers its jobs with; the exchange files of both are in ``folder``."""
    request, answer = folder / "jobs.json", folder / "arrays.npz"
    request.write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, str(request), str(answer)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"megatron-core failed:\n{done.stderr[-4000:]}")
    with np.load(answer) as arrays:
        return {key: arrays[key] for key in arrays.files}
