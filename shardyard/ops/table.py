"""The start-up table of operators."""

from __future__ import annotations

from collections.abc import Iterable

from shardyard.ops.registry import Row


def operator_lines(rows: Iterable[Row]) -> list[str]:
    """Lines of the table: operation, what runs, why."""
    table = [Row("operation", "runs", "why"), *rows]
    widths = [max(len(row[column]) for row in table) + 2 for column in range(2)]
    return [f"{row.operation:<{widths[0]}}{row.runs:<{widths[1]}}{row.why}".rstrip() for row in table]
