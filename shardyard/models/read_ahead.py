"""Weight files on their way into memory while the data is tokenised.

The system is asked to read them into its page cache, which all ranks of a machine share; each then reads its
slices (weight_files.py) from there. Nothing waits for it, and nothing depends on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

_KINDS = (".safetensors", ".bin", ".distcp")
_SHARE_OF_MEMORY = 0.5
"""Of the memory that is free. Pages beyond it would drive out those read first."""


def read_ahead(folder: Path) -> threading.Thread | None:
    """Ask for the weight files in ``folder``, from a thread that only waits for the disk; one rank of a
    machine calls it. None where the system cannot be asked, or the files would not stay in memory.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _KINDS and path.is_file())
    total = sum(path.stat().st_size for path in files)
    room = psutil.virtual_memory().available * _SHARE_OF_MEMORY
    if not files or total > room or not hasattr(os, "posix_fadvise"):
        return None
    thread = threading.Thread(target=_ask_for, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _ask_for(files: Sequence[Path]) -> None:
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # whoever needs it will say so
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:  # a file system that takes no advice
            return
        finally:
            os.close(descriptor)
