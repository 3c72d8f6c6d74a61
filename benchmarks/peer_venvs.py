"""An environment for each peer, made once from its file of pinned requirements (peers/*.txt)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = Path.home() / ".cache" / "shardyard" / "peers"
REQUIREMENTS = {"trainer": "trainer", "trl": "trl", "trl-padding-free": "trl"}
"""Peer -> the name of its file of requirements."""


def python_of(peer: str, folder: Path) -> Path:
    """The interpreter of the peer's environment in ``folder``, which is made if it is not there yet.

    An environment is known by its requirements: with other ones another is made. One whose installation was
    cut off has no stamp, and is made again.
    """
    requirements = HERE / "peers" / f"{REQUIREMENTS[peer]}.txt"
    key = hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    home = folder / f"{requirements.stem}-{key}"
    python, stamp = home / "bin" / "python", home / "complete"
    if not stamp.exists():
        print(f"making {home} from {requirements} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
        stamp.touch()
    return python
