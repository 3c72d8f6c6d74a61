"""Run a script of examples/fsdp2 in a copy, so that nothing is written into the repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted((EXAMPLES / "fsdp2").glob("*/*.sh"))
OWN_VARIABLES = (
    "NPUS_PER_NODE", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MODEL_PATH",
    "DATA_PATH", "OUTPUT_DIR", "ASCEND_OPP_PATH", "ASCEND_TOOLKIT_HOME", "TORCH_HCCL_ZERO_COPY",
)  # fmt: skip
"""What the scripts read or set; taken out of the tests' own environment."""


def by_path(path: Path) -> str:
    """A short test id."""
    return path.relative_to(EXAMPLES).as_posix()


def copy_outside(root: Path) -> Path:
    """Copy the examples, the entry and the data registry into a folder of ``root``; return that."""
    copy = root / "a folder with spaces"
    files = [
        REPOSITORY / "train_fsdp2.py",
        *(EXAMPLES / "fsdp2").rglob("*"),
        *(REPOSITORY / "configs").rglob("*"),
    ]
    for file in files:
        if file.is_file():
            target = copy / file.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
            target.chmod(file.stat().st_mode)
    return copy


def run_script(
    copy: Path, script: Path, *words: str, cwd: Path, first_on_path: Path, timeout_s: float = 30.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run the copy of ``script`` with ``environment`` and without the caller's values of OWN_VARIABLES."""
    bare = {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES}
    path = f"{first_on_path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(copy / script.relative_to(REPOSITORY)), *words],
        cwd=cwd, env=bare | {"PATH": path} | environment, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
