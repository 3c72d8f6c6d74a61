"""The resolved configuration as text: a table for the reader, and a YAML file that loads to an equal one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from shardyard.config.loader import Origin
from shardyard.config.schema import FIELDS, SECTIONS, Config, get

SECRETS = frozenset({"model.hf_hub_token", "model.ms_hub_token", "model.om_hub_token"})
"""Settings whose value is never printed or written."""

_WIDEST_VALUE = 44


def format_table(config: Config, origins: Mapping[str, Origin], paths: Collection[str] = FIELDS) -> str:
    """Settings (all, or those in ``paths``), value and origin, in aligned columns, one section after the
    other.
    """
    rows = {path: _shown(path, get(config, path)) for path in FIELDS if path in paths}
    key_width = max(len(path.split(".")[1]) for path in rows)
    value_width = min(_WIDEST_VALUE, max(len(text) for text in rows.values()))
    lines: list[str] = []
    for section, model in SECTIONS.items():
        keys = [key for key in model.model_fields if f"{section}.{key}" in rows]
        if keys:
            lines.append(f"{section}:")
        for key in keys:
            path = f"{section}.{key}"
            lines.append(f"  {key:<{key_width}}  {rows[path]:<{value_width}}  {_origin(origins, path)}")
    return "\n".join(lines)


def dump_yaml(config: Config, origins: Mapping[str, Origin]) -> str:
    """The configuration as YAML with each value's origin as a comment.

    ``load_config`` reads it back to an equal Config; only access tokens are left out.
    """
    lines = ["# The resolved configuration of a run, with the origin of each value."]
    for section, model in SECTIONS.items():
        if model.model_fields:
            lines.append(f"{section}:")
        for key in model.model_fields:
            path = f"{section}.{key}"
            value = None if path in SECRETS else get(config, path)
            lines.append(f"  {key}: {to_yaml(value)}  # {_origin(origins, path)}")
    return "\n".join(lines) + "\n"


def to_yaml(value: Any) -> str:
    """A value in YAML's flow style; text is always quoted, and its ``${`` is not a reference."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(key))}: {to_yaml(part)}" for key, part in value.items()) + "}"
    return _quoted(value.replace("${", "$${")) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"


def _shown(path: str, value: Any) -> str:
    if path in SECRETS and value is not None:
        return "(hidden)"
    return (
        "".join(char if char.isprintable() else " " for char in value)
        if isinstance(value, str)
        else to_yaml(value)
    )


def _origin(origins: Mapping[str, Origin], path: str) -> str:
    text = str(origins.get(path, "set by the program"))
    return "".join(char if char.isprintable() else "?" for char in text)
