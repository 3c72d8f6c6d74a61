"""A row, and what stands in the place of one that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardyard.errors import UserError


@dataclass(frozen=True)
class Row:
    """One row: its columns by name, and where it stands."""

    data: dict[str, Any]
    where: str


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read: why, in words to count by, where it stands, and the whole message."""

    reason: str
    where: str
    message: str = ""

    def error(self) -> UserError:
        """What stops the run under ``on_bad_row: stop``."""
        return UserError(f"{self.where}: {self.message or self.reason}")


Rows: TypeAlias = Iterator[Row | BadRow]


def malformed(where: str, message: str, column: int) -> BadRow:
    """The bad row of a malformed piece of JSON."""
    return BadRow(
        "not valid JSON", where, f"not valid JSON: {message} (column {column}); mend or remove this row"
    )


class Skip:
    """The rows that are still to be passed over, counted down by the readers of one file after another."""

    def __init__(self, rows: int) -> None:
        self.left = rows

    def takes_one(self) -> bool:
        """Whether the row at hand is passed over."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def takes(self, rows: int) -> int:
        """How many of the next ``rows`` are passed over."""
        taken = min(rows, self.left)
        self.left -= taken
        return taken
