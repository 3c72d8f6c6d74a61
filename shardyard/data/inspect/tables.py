"""A survey as text: blocks of lines under headings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardyard.data.inspect.view import View

_BAR = 40
"""Characters of the longest bar of a histogram."""

Block = tuple[str, list[str]]
"""A heading and its lines."""


def blocks_of(found: dict[str, Any], view: View) -> list[Block]:
    """``found`` is the survey of ``view``."""
    blocks: list[Block] = []
    for told, source in zip(found["sources"], view.sources, strict=True):
        more = [_duplicates(told["duplicates"]), *_lengths(told["lengths"])]
        blocks.append((f"{told['name']} ({told['path']})", [*source.report.lines(), *more]))
    if not all(source.count == len(view) for source in view.sources):  # several, or not told apart
        total = found["total"]
        blocks.append(("all together", [*view.total.lines(), _duplicates(total["duplicates"])]))
    blocks.append((_epoch_heading(view), _epoch(found["epoch"])))
    if found["validation"]:
        blocks.append(("validation", _aligned([_validation(one) for one in found["validation"]])))
    blocks.append(("the run", _run(found["run"])))
    return blocks


def _validation(told: dict[str, Any]) -> tuple[str, str]:
    counts = f"{told['samples']} samples, {told['tokens']} tokens"
    also = f", {told['also_trained']} of them also in training" if told["also_trained"] else ""
    return told["name"], counts + also


def _epoch_heading(view: View) -> str:
    return "an epoch" if view.stretch is None else view.stretch


def _duplicates(told: dict[str, Any] | None) -> str:
    if told is None:
        return "  duplicates: not looked for, there are too many tokens to read through"
    line = f"  duplicate {told['of']}: {told['count']}"
    if told["first"] is not None:
        earlier, later = told["first"]
        line += f" (first: {told['of'][:-1]} {later} is the same as {earlier})"
    return line


def _lengths(told: dict[str, Any]) -> list[str]:
    buckets = told["buckets"]
    if not buckets:
        return []
    largest = max(bucket["count"] for bucket in buckets)
    lines = [
        f"  half of the {told['of']} have at most {told['median']:.0f} tokens, 99 % at most "
        f"{told['percentile_99']:.0f}"
    ]
    width = len(str(buckets[-1]["up_to"]))
    for bucket in buckets:
        bar = "#" * -(-bucket["count"] * _BAR // largest)
        lines.append(f"    up to {bucket['up_to']:>{width}}  {bucket['count']:>9}  {bar}".rstrip())
    return lines


def _epoch(told: dict[str, Any]) -> list[str]:
    rows = [("samples", str(told["samples"]))]
    if len(told["per_source"]) > 1:
        for one in told["per_source"]:
            share = 100 * one["samples"] / max(told["samples"], 1)
            rows.append((f"of {one['name']}", f"{one['samples']} ({share:.1f} %)"))
    packs = told["packs"]
    if packs is not None and packs["count"]:
        rows.append(
            (
                "packs",
                f"{packs['count']} of at most {packs['capacity']} tokens, "
                f"{100 * packs['share_filled']:.1f} % full, {packs['samples_each']:.1f} samples each",
            )
        )
    return _aligned(rows)


def _run(told: dict[str, Any]) -> list[str]:
    per_epoch = told["updates_per_epoch"]
    return _aligned(
        [
            ("ranks", f"{told['world_size']}, {told['data_parallel']} of them with different samples"),
            ("global batch", str(told["global_batch"])),
            ("updates of an epoch", "not known beforehand" if per_epoch is None else str(per_epoch)),
            ("updates of the run", str(told["total_steps"])),
        ]
    )


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]
