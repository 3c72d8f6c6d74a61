"""Where Megatron's indexed data set keeps what; shared by reader and writer.

``<prefix>.bin`` is the token ids of all sequences, end to end. ``<prefix>.idx``, all little-endian, for S
sequences and D documents:

    9 bytes    "MMIDIDX" and two zero bytes        uint64      version, 1
    uint8      code of the ids' type               uint64      S
    uint64     D + 1                               int32 [S]   tokens of each sequence
    int64 [S]  byte of .bin where each begins      int64 [D+1] the first sequence of each document, then S
    int8 [S]   mode of each sequence, in multimodal data sets only

Source: megatron-core 0.16.1, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, S, D + 1."""

DTYPE_OF_CODE = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
FLOAT_CODES = {6: "float64", 7: "float32"}
"""Types that the format knows but that hold no token ids."""

LENGTH = np.dtype("<i4")
OFFSET = np.dtype("<i8")
MODE = np.dtype("i1")

CHUNK = 1 << 20
"""Entries that are checked, copied or written at a time: few enough for a processor's cache."""


def bin_path(prefix: Path) -> Path:
    """The file of token ids. A prefix may hold dots, so it is no suffix that is replaced."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """The file of lengths and pointers."""
    return prefix.with_name(f"{prefix.name}.idx")


def dtype_for(vocab_size: int) -> np.dtype:
    """The type Megatron writes for a vocabulary of this size: uint16 below 65,500 ids, else int32.

    Source: ``DType.optimal_dtype`` of megatron-core.
    """
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")
