"""Large tensors have memory of their own, on huge pages; small ones share a heap that is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardyard.allocator import tune_for_tensors

PROGRAM = """
import ctypes, sys
from shardyard.allocator import tune_for_tensors
if sys.argv[1] == "tuned":
    assert tune_for_tensors()
import torch

class Info(ctypes.Structure):  # struct mallinfo2 of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
warm = torch.empty(31 << 20, dtype=torch.uint8)
del warm  # glibc's own threshold grows to what was freed
before = libc.mallinfo2().hblkhd
large = torch.empty(7 << 20, dtype=torch.uint8)
small = torch.empty(3 << 20, dtype=torch.uint8)
print(libc.mallinfo2().hblkhd - before)
"""


def mapped(how: str) -> int:
    """Bytes that a tensor of 5 MiB and one of 3 MiB took as memory of their own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_tensors_from_six_mebibytes_on_have_their_own_memory():
    assert 7 << 20 <= mapped("tuned") < (7 << 20) + (1 << 16)
    assert mapped("as it is") == 0


@pytest.mark.parametrize("name", ["LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "THP_MEM_ALLOC_ENABLE"])
def test_the_users_choice_stands(name):
    environment = {name: "1"}
    assert not tune_for_tensors(environment)
    assert environment == {name: "1"}
