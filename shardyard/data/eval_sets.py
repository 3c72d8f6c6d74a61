"""What a run is validated on: named samples, apart from those that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardyard.data.types import Sample


class CountedSamples(Protocol):
    """Samples whose number is known: a ``SampleStore`` or a part of one, a list in a test."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class EvalSet:
    """One validation set. ``name`` stands in the log and in ``metrics.jsonl``; all ranks hold all samples."""

    name: str
    samples: CountedSamples
