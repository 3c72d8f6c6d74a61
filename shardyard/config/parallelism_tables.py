"""The tables of docs/parallelism.md that come from the checker's own."""

from __future__ import annotations

import re

from shardyard.config.layout_rules import RULES
from shardyard.config.support import AXES, EXCEPTIONS, FEATURES, NEVER, Verdict, verdict_of


def refreshed(page: str) -> str:
    """``page`` with each ``<!-- table: NAME -->`` ... ``<!-- end -->`` block filled anew."""
    for name, lines in {"rules": rules_table(), "support": support_table()}.items():
        block = "\n".join([f"<!-- table: {name} -->", "", *lines, "", "<!-- end -->"])
        page = re.sub(
            rf"<!-- table: {name} -->.*?<!-- end -->", lambda _, block=block: block, page, flags=re.S
        )
    return page


def rules_table() -> list[str]:
    """One row for each rule of the layout."""
    rows = [f"| `{rule.key}` | {rule.says} |" for rule in RULES]
    return ["| setting | rule |", "|---|---|", *rows]


def support_table() -> list[str]:
    """Features against axes, the exceptions between other features, and what is refused for good."""
    notes: list[str] = []
    cells = {name: [_cell(name, axis, notes) for axis in AXES] for name in FEATURES}
    plain = [name for name, row in cells.items() if name not in AXES and set(row) == {"yes"}]
    rows = [
        f"| {FEATURES[name].title} | {' | '.join(row)} |" for name, row in cells.items() if name not in plain
    ]
    others = [
        f"- {FEATURES[one].title} with {FEATURES[other].title}: {verdict.kind}; {verdict.reason}."
        for (one, other), verdict in EXCEPTIONS.items()
        if not {one, other}.intersection(AXES)
    ]
    return [
        f"| | {' | '.join(AXES)} |",
        f"|---|{'---|' * len(AXES)}",
        *rows,
        "",
        *(f"{number}. {note}." for number, note in enumerate(notes, 1)),
        "",
        f"With every axis work: {', '.join(FEATURES[name].title for name in plain)}.",
        "",
        f"All other pairs of these {len(FEATURES)} features work too, but for:",
        "",
        *others,
        "",
        "Refused whatever else is set:",
        "",
        *(f"- `{item.path}`{_values(item.values)}: {item.reason}." for item in NEVER),
    ]


def _cell(name: str, axis: str, notes: list[str]) -> str:
    if name == axis or (name.startswith("cp-") and axis.startswith("cp-")):
        return ""
    verdict: Verdict | None = verdict_of(name, axis)
    if verdict is None:
        return "yes"
    if verdict.reason not in notes:
        notes.append(verdict.reason)
    word = {"no effect": "no effect", "in part": "in part"}.get(verdict.kind, "no")
    return f"{word} ({notes.index(verdict.reason) + 1})"


def _values(values: tuple[object, ...] | None) -> str:
    return " away from its default" if values is None else f" {', '.join(f'`{value}`' for value in values)}"
