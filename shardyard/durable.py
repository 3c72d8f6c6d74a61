"""Files and folders that survive a power cut, and temporary names that a killed process leaves behind."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import IO, Any


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(file: IO[Any]) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def write_durably(path: Path, text: str) -> None:
    """Write a UTF-8 text and make it durable; the name is its folder's to sync."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        flush(file)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that tells which process of which machine writes there."""
    return path.with_name(f"{_marker(path)}{os.getpid()}-{secrets.token_hex(4)}")


def remove_leftovers(path: Path) -> None:
    """Remove what stands under a temporary name of ``path`` whose process, on this machine, is gone."""
    marker = _marker(path)
    for found in path.parent.iterdir():
        if not found.name.startswith(marker):
            continue
        pid = found.name[len(marker) :].split("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            if found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _marker(path: Path) -> str:
    host = "".join(c if c.isalnum() else "_" for c in socket.gethostname())
    return f"{path.name}.tmp-{host}-"
