"""The file of a tokenised window: complete or absent, read by memory map.

Legend: N samples, U units, T tokens of all samples, D documents (attention segments) of all samples.

    magic, length of the header (uint64), header (JSON), then the arrays of ``_ARRAYS`` in that order, each
    from a multiple of 8 bytes on, little-endian
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shardyard.data.order import Units
from shardyard.data.report import Report
from shardyard.data.stream.tokenise import TokenisedWindow
from shardyard.data.types import Sample

_MAGIC = b"SYSTREAM"
_ARRAYS = {
    "offsets": np.dtype("<i8"),  # [N + 1] where a sample's tokens begin
    "doc_offsets": np.dtype("<i8"),  # [N + 1] where its documents begin
    "unit_samples": np.dtype("<i8"),  # [N] samples in the order of the units
    "unit_offsets": np.dtype("<i8"),  # [U + 1] where a unit's samples begin
    "input_ids": np.dtype("<i4"),  # [T]
    "labels": np.dtype("<i4"),  # [T]
    "doc_lens": np.dtype("<i4"),  # [D]
}


class Window:
    """An open window; its arrays stay readable when the file is removed."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if it is not a whole window, FileNotFoundError if it is not there."""
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        if bytes(data[:8]) != _MAGIC or len(data) < 16:
            raise ValueError(f"{path} is no window")
        begin = 16 + int(data[8:16].view("<u8")[0])
        header = json.loads(bytes(data[16:begin]))
        arrays = {}
        for name, dtype in _ARRAYS.items():
            begin, end = _aligned(begin), _aligned(begin) + header["lengths"][name] * dtype.itemsize
            if end > len(data):
                raise ValueError(f"{path} is cut off")
            arrays[name], begin = data[begin:end].view(dtype), end
        self.report = Report.from_json(header["report"])
        self.units = Units(arrays["unit_samples"], arrays["unit_offsets"])
        """Its units; samples are numbered from 0."""
        self._arrays = arrays

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self._arrays["offsets"]) - 1

    def sample(self, number: int) -> Sample:
        """One of its samples; the arrays are views."""
        doc_lens = self.doc_lens(number)
        tokens = slice(*self._arrays["offsets"][number : number + 2].tolist())
        return Sample(self._arrays["input_ids"][tokens], self._arrays["labels"][tokens], doc_lens)

    def doc_lens(self, number: int) -> tuple[int, ...]:
        """The documents of one of its samples, without reading its tokens."""
        if not 0 <= number < self.num_samples:
            raise IndexError(f"sample {number} of {self.num_samples}")
        documents = slice(*self._arrays["doc_offsets"][number : number + 2].tolist())
        return tuple(self._arrays["doc_lens"][documents].tolist())


def write_window(path: Path, made: TokenisedWindow) -> None:
    """Write a window; it is there whole or not at all.

    Not forced to the disk: it is of use to this run of the machine only.
    """
    blocks = made.blocks
    pieces = {
        "offsets": [_offsets(block.lengths for block in blocks)],
        "doc_offsets": [_offsets(block.doc_counts for block in blocks)],
        "unit_samples": [made.units.indices],
        "unit_offsets": [made.units.offsets],
        "input_ids": [block.input_ids for block in blocks],
        "labels": [block.labels for block in blocks],
        "doc_lens": [block.doc_lens for block in blocks],
    }
    lengths = {name: sum(map(len, arrays)) for name, arrays in pieces.items()}
    header = json.dumps({"report": made.report.to_json(), "lengths": lengths}, ensure_ascii=False).encode()
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            for name, dtype in _ARRAYS.items():
                file.write(bytes(_aligned(file.tell()) - file.tell()))
                for array in pieces[name]:
                    file.write(array.astype(dtype, copy=False).tobytes())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def leftovers(path: Path) -> Iterator[Path]:
    """What writers of this window that were killed have left."""
    return path.parent.glob(f"{path.name}.tmp-*")


def _offsets(lengths: Iterable[np.ndarray]) -> np.ndarray:
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)


def _aligned(position: int) -> int:
    return -(-position // 8) * 8
