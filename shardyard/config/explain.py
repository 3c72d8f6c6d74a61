"""One setting in words: what the documentation and ``shardyard check --explain`` say about it."""

from __future__ import annotations

from dataclasses import replace

from shardyard.config.later import LATER
from shardyard.config.rules import show
from shardyard.config.schema import FIELDS
from shardyard.config.suggest import suggest
from shardyard.config.support import NEVER
from shardyard.config.values import kind_of
from shardyard.errors import UserError

_LIMITS = {"Ge": ("ge", ">="), "Gt": ("gt", ">"), "Le": ("le", "<="), "Lt": ("lt", "<")}


def find_key(name: str) -> str:
    """``section.key`` for a full path or a key alone (keys are unique over the sections).

    Raises:
        UserError: there is none; the message has the nearest.
    """
    matches = [path for path in FIELDS if name in (path, path.split(".")[1])]
    if not matches:
        raise UserError(f"--explain {name}: no such key{suggest(name)}")
    return matches[0]


def explain(path: str) -> str:
    """Type, default, limits, meaning in both languages and state of one setting."""
    rows = {"type": type_text(path), "default": default_text(path), "meaning": FIELDS[path].description or ""}
    limits = limits_text(path)
    if limits:
        rows["range"] = limits
    rows["中文"] = chinese(path)
    if path in LATER:
        rows["note"] = later_text(path)
    for never in NEVER:
        if never.path == path:
            values = ", ".join(map(show, never.values or ())) or "any value but the default"
            rows["refused"] = f"{values}: {never.reason}"
    return "\n".join([path, *(f"  {name}: {text}" for name, text in rows.items())])


def type_text(path: str) -> str:
    """The type of a setting in words, without values that are always refused."""
    kind = kind_of(FIELDS[path])
    refused = {value for never in NEVER if never.path == path for value in never.values or ()}
    return replace(kind, choices=tuple(word for word in kind.choices if word not in refused)).describe()


def default_text(path: str) -> str:
    """Its default as one writes it."""
    info = FIELDS[path]
    return "required" if info.is_required() else show(info.get_default())


def limits_text(path: str) -> str:
    """Its bounds, such as ``>= 0, < 1``; empty if it has none."""
    found = [(type(item).__name__, item) for item in FIELDS[path].metadata]
    return ", ".join(
        f"{_LIMITS[name][1]} {getattr(item, _LIMITS[name][0])}" for name, item in found if name in _LIMITS
    )


def later_text(path: str) -> str:
    """What is refused for now, for a setting in the table of later features."""
    later = LATER[path]
    values = ", ".join(map(show, later.refused)) or "any value but the default"
    return f"{values} is refused until a later release brings {later.feature.rstrip(',')}"


def chinese(path: str) -> str:
    """Its meaning in Chinese."""
    extra = FIELDS[path].json_schema_extra
    return str(extra.get("zh", "")) if isinstance(extra, dict) else ""
