"""What batches become, and the counts that grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardyard.data.report import Dropped


@dataclass(frozen=True)
class Outcome:
    """What one batch became: flat arrays by name, compact enough to be sent between processes."""

    arrays: dict[str, np.ndarray]
    rows: int
    dropped: Sequence[tuple[str, str]] = ()
    """(reason, where) in the order of the rows."""
    counts: dict[str, int] = field(default_factory=dict)
    """Further things worth counting, by the words that tell them."""


@dataclass
class Tally:
    """Counts over the whole input; travels in segments and manifests."""

    rows: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.rows += outcome.rows
        for reason, where in outcome.dropped:
            self.dropped.setdefault(reason, Dropped(0, where)).count += 1
        self.counts.update(outcome.counts)

    def to_json(self) -> dict[str, Any]:
        dropped = {reason: [drop.count, drop.first] for reason, drop in self.dropped.items()}
        return {"rows": self.rows, "dropped": dropped, "counts": dict(self.counts)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        dropped = {reason: Dropped(*drop) for reason, drop in values["dropped"].items()}
        return cls(values["rows"], dropped, Counter(values["counts"]))


def report(tally: Tally, written: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What became of an input, as plain values under the words that tell them."""
    dropped = {reason: {"rows": drop.count, "first": drop.first} for reason, drop in tally.dropped.items()}
    speed = round(written["tokens"] / max(seconds, 1e-9))
    counts = {what: count for what, count in tally.counts.items() if count}
    return {
        "rows read": tally.rows,
        "dropped": dropped,
        **counts,
        **written,
        "seconds": round(seconds, 3),
        "tokens a second": speed,
    }


def report_lines(counts: dict[str, Any]) -> list[str]:
    """The same as a table, one line a count."""
    table: list[tuple[str, str]] = []
    for what, value in counts.items():
        if what == "dropped":
            drops = sorted(value.items(), key=lambda item: -item[1]["rows"])
            table += [(f"dropped: {why}", f"{d['rows']:,} (first: {d['first']})") for why, d in drops]
        else:
            table.append((what, value if isinstance(value, str) else f"{value:,}"))
    width = max(len(what) for what, _ in table)
    return [f"  {what:<{width}}  {value}" for what, value in table]
