"""What stands in the place of a conversation or its samples when a row cannot be used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dropped:
    """A row that is left out: why, in words that the report counts by, and where it stands."""

    reason: str
    where: str


class NotUsable(Exception):
    """Raised while a row is converted or encoded; its text is the reason. Never leaves this room."""
