"""What fine-tuning and pretraining share: batches of input -> outcomes in any process -> samples in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

from shardyard.data.progress import Progress
from shardyard.data.report import Encoded, Report
from shardyard.data.store import StoreWriter
from shardyard.data.workers import ordered_map

T = TypeVar("T")


class Pipeline(Protocol):
    """One way from input to samples."""

    unit: str
    """What a row of the input is called, in the plural."""

    @property
    def work(self) -> Callable[[Any], Any]:
        """Turns one batch into an outcome; runs in a tokenising process."""
        ...

    def batches(self) -> Iterator[list[Any]]:
        """The input, in order, in batches."""
        ...

    def collect(self, outcome: Any) -> Encoded:
        """The samples of the next outcome, in the order of the batches."""
        ...

    def rest(self) -> Encoded | None:
        """What is left when the input has ended."""
        ...


def run_pipeline(pipeline: Pipeline, writer: StoreWriter, *, workers: int, total: int | None) -> Report:
    """Write all samples of the pipeline's input; ``total`` rows are expected, if known.

    The bytes written do not depend on ``workers``.
    """
    report = Report(pipeline.unit)

    def keep(encoded: Encoded) -> None:
        report.add(encoded)
        writer.add(encoded.block)

    with Progress(pipeline.unit, total) as progress:
        for outcome in ordered_map(pipeline.work, pipeline.batches(), workers=workers):
            encoded = pipeline.collect(outcome)
            keep(encoded)
            progress.advance(encoded.rows)
    rest = pipeline.rest()
    if rest is not None:
        keep(rest)
    return report


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
