"""The host's memory allocator, set for what training does to it.

A step allocates and frees thousands of tensors of some megabytes, whose sizes change with the number of
tokens. glibc serves them from one heap, where the gaps between those that stay are too small or too large for
the next ones, and gives memory back and takes it again, page by page. Here large tensors get memory of their
own, on huge pages, and the heap keeps what it has. For SmolLM2-135M on a CPU the peak of a process fell by a
tenth, at the same speed (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_OWN_MEMORY_FROM = 6 * 2**20
"""Bytes from which a tensor has memory of its own: three huge pages. Smaller ones are up to half small pages,
whose faults cost a tenth of a pretraining step."""
_NEVER = 2**31 - 1
_USERS_CHOICES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")


def tune_for_tensors(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Call it before torch is imported, which asks for huge pages only then.

    Returns:
        Whether it was done: not on other systems than Linux with glibc, nor where the user has chosen an
        allocator or its settings in the environment.
    """
    chosen = any(name.startswith(_USERS_CHOICES) for name in environment)
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    environment["THP_MEM_ALLOC_ENABLE"] = "1"
    return bool(mallopt(_M_MMAP_THRESHOLD, _OWN_MEMORY_FROM) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
