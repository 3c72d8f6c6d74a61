"""``shardyard env``: what this machine and installation are, to be pasted into a bug report."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from shardyard import __version__
from shardyard.errors import UserError

_PACKAGES = (
    "torch",
    "torch_npu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
)


def env(argv: Sequence[str]) -> int:
    """Print versions and devices.

    Raises:
        UserError: ``argv`` is not empty.
    """
    if set(argv) & {"-h", "--help"}:
        print("usage: shardyard env\n\nPrints versions and devices, for bug reports.")
        return 0
    if argv:
        raise UserError(f"shardyard env takes no arguments, but got {argv[0]!r}")
    for name, value in _report():
        print(f"{name:<14} {value}")
    return 0


def _report() -> list[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory().total / 1024**3
    return [
        ("shardyard", __version__),
        ("python", platform.python_version()),
        ("system", platform.platform()),
        *((package, found) for package in _PACKAGES if (found := _version(package)) is not None),
        ("cpu", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, {memory:.1f} GiB memory"),
        ("accelerators", _accelerators()),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> str:
    from shardyard.device import visible_accelerators

    try:
        kind, count = visible_accelerators()
    except UserError as error:  # part of the report here, not its end
        return str(error)
    return f"{count} x {kind}" if count else "none"
