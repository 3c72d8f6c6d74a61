"""What became of the input: counts by outcome, and one sample decoded with its trained part marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from shardyard.data.store import SampleBlock
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """What one batch of rows became; ``dropped`` are (reason, where) in the order of the rows."""

    block: SampleBlock
    rows: int
    dropped: Sequence[tuple[str, str]] = ()
    truncated: int = 0
    """Rows that were cut to ``data.cutoff_len``."""
    split: int = 0
    """Rows that became several samples, one per reply."""
    notes: Sequence[tuple[str, str]] = ()
    """(what was left out of a row that is used, where)."""


@dataclass
class Dropped:
    """How many rows were dropped, or are noted, for one reason, and where the first of them is."""

    count: int
    first: str


@dataclass
class Report:
    """Counts over the whole input; grows by ``add``, and travels in the store's manifest."""

    unit: str
    """What a row is called: rows, or documents."""
    rows: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    notes: dict[str, Dropped] = field(default_factory=dict)
    """Rows that are used, but not all of them: what was left out (beside truncation)."""
    truncated: int = 0
    split: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    shortest: int = 0
    longest: int = 0
    largest_id: int = -1
    """The largest token id of inputs and targets; it must be below the model's vocabulary size."""

    def add(self, encoded: Encoded) -> None:
        """Count the rows of a batch and the samples of its block."""
        self.rows += encoded.rows
        self.truncated += encoded.truncated
        self.split += encoded.split
        for counted, found in ((self.dropped, encoded.dropped), (self.notes, encoded.notes)):
            for reason, where in found:
                counted.setdefault(reason, Dropped(0, where)).count += 1
        self.add_samples(encoded.block)

    def add_samples(self, block: SampleBlock) -> None:
        """Count samples alone."""
        if not len(block.lengths):
            return
        shortest, longest = int(block.lengths.min()), int(block.lengths.max())
        self.shortest = min(self.shortest, shortest) if self.samples else shortest
        self.longest = max(self.longest, longest)
        self.largest_id = max(self.largest_id, int(block.input_ids.max()), int(block.labels.max()))
        self.samples += len(block.lengths)
        self.tokens += len(block.input_ids)
        self.trained_tokens += int(np.count_nonzero(block.labels != IGNORE_INDEX))

    @classmethod
    def total(cls, reports: Sequence[Report]) -> Report:
        """The counts of several inputs together."""
        total = cls(reports[0].unit)
        for report in reports:
            for name in _SUMS:
                setattr(total, name, getattr(total, name) + getattr(report, name))
            for counted, more in ((total.dropped, report.dropped), (total.notes, report.notes)):
                for reason, drop in more.items():
                    counted.setdefault(reason, Dropped(0, drop.first)).count += drop.count
            if report.samples:
                total.shortest = min(total.shortest or report.shortest, report.shortest)
                total.longest = max(total.longest, report.longest)
            total.largest_id = max(total.largest_id, report.largest_id)
        return total

    def lines(self) -> list[str]:
        """The table, one line a count."""
        table: list[tuple[str, str]] = [(f"{self.unit} read", str(self.rows))]
        for word, counted in (("dropped", self.dropped), ("noted", self.notes)):
            for reason, drop in sorted(counted.items(), key=lambda item: -item[1].count):
                table.append((f"{word}: {reason}", f"{drop.count} (first: {drop.first})"))
        if self.truncated:
            table.append(("truncated to data.cutoff_len", str(self.truncated)))
        if self.split:
            table.append(("split into one sample per reply", str(self.split)))
        table.append(("samples", str(self.samples)))
        table.append(("tokens", str(self.tokens)))
        share = f" ({100 * self.trained_tokens / self.tokens:.1f} %)" if self.tokens else ""
        table.append(("trained tokens", f"{self.trained_tokens}{share}"))
        if self.samples:
            mean = self.tokens / self.samples
            table.append(("tokens of a sample", f"{self.shortest} min, {mean:.1f} mean, {self.longest} max"))
        width = max(len(name) for name, _ in table)
        return [f"  {name:<{width}}  {value}" for name, value in table]

    def require_training_data(self) -> None:
        """Raise UserError, with the table, unless something is left to train on."""
        if self.rows == 0:
            fault = f"data.dataset: the input has no {self.unit}"
        elif self.samples == 0:
            fault = f"data.dataset: none of the {self.rows} {self.unit} became a sample"
        elif self.trained_tokens == 0:
            fault = (
                f"data.dataset: none of the {self.tokens} tokens would be trained (is data.cutoff_len long "
                f"enough to reach the replies?)"
            )
        else:
            return
        raise UserError("\n".join([fault, *self.lines()]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        counted = {
            name: {reason: Dropped(**drop) for reason, drop in values.get(name, {}).items()}
            for name in ("dropped", "notes")
        }
        return cls(**{**values, **counted})


_SUMS = ("rows", "truncated", "split", "samples", "tokens", "trained_tokens")


class Decoder(Protocol):
    """The part of a tokenizer that a preview needs."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Preview:
    """One sample for the eye: its text with the trained parts in ``[[ ]]``, its ids and labels."""

    text: str
    input_ids: list[int]
    labels: list[int]


def preview(sample: Sample, tokenizer: Decoder, max_tokens: int = 1024) -> Preview:
    """Decode the first ``max_tokens`` of a sample, special tokens included; targets are marked."""
    input_ids, labels = sample.input_ids[:max_tokens], sample.labels[:max_tokens]
    pieces = [
        f"[[{text}]]" if trained else text
        for text, trained in stretches(input_ids, trained_tokens(labels), tokenizer)
    ]
    cut = len(sample.input_ids) - len(input_ids)
    text = "".join(pieces) + (f" ... ({cut} more tokens)" if cut else "")
    return Preview(text, input_ids.tolist(), labels.tolist())


def trained_tokens(labels: np.ndarray) -> np.ndarray:
    """Which tokens [n] are the target of the position before them; the first one is nobody's."""
    trained = np.zeros(len(labels), bool)
    trained[1:] = labels[:-1] != IGNORE_INDEX
    return trained


def stretches(input_ids: np.ndarray, trained: np.ndarray, tokenizer: Decoder) -> list[tuple[str, bool]]:
    """The text of tokens [n] in pieces that are trained as a whole or not at all, special tokens included."""
    bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(input_ids)]
    pieces = []
    for begin, end in pairwise(bounds):
        if begin < end:
            text = tokenizer.decode(input_ids[begin:end].tolist(), skip_special_tokens=False)
            pieces.append((str(text), bool(trained[begin])))
    return pieces
