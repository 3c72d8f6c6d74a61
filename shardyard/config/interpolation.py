"""``${NAME}``, ``${NAME:-default}`` and ``${section.key}`` inside values; ``$${`` is a literal ``${``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.config.schema import FIELDS
from shardyard.config.source import COMMAND_LINE, Entry, ListNode, MapNode, Node, Notes, Place, Scalar
from shardyard.config.suggest import suggest

_PATTERN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_WHOLE_KEY = re.compile(r"\$\{(\w+\.\w+)\}")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)(?::-(.*))?", re.DOTALL)


class _Unresolved(Exception):
    """A reference that leads nowhere; the message says why."""


def interpolate(values: Mapping[str, Node], environ: Mapping[str, str], notes: Notes) -> dict[str, Node]:
    """``values`` with every reference replaced; one that cannot be is left out, with a fault in ``notes``."""
    resolver = _Resolver(values, environ)
    result: dict[str, Node] = {}
    for path, node in values.items():
        try:
            result[path] = resolver.key(path, node.place)
        except _Unresolved as reason:
            notes.fault(node.place, path, str(reason))
    return result


class _Resolver:
    def __init__(self, values: Mapping[str, Node], environ: Mapping[str, str]) -> None:
        self.values, self.environ = values, environ
        self.open: list[str] = []

    def key(self, path: str, place: Place) -> Node:
        """The node of a key, set or default, without references."""
        if path not in FIELDS:
            raise _Unresolved(f"${{{path}}} names no key{suggest(path)}")
        if path not in self.values:
            return default_node(path, place)
        if path in self.open:
            raise _Unresolved(f"refers to itself: {' -> '.join([*self.open[self.open.index(path) :], path])}")
        self.open.append(path)
        try:
            return self.node(self.values[path])
        finally:
            self.open.pop()

    def node(self, node: Node) -> Node:
        if isinstance(node, ListNode):
            return replace(node, items=tuple(self.node(item) for item in node.items))
        if isinstance(node, MapNode):
            return replace(
                node, entries=tuple(replace(entry, value=self.node(entry.value)) for entry in node.entries)
            )
        whole = _WHOLE_KEY.fullmatch(node.text)
        if whole:
            return _moved(self.key(whole[1], node.place), node.place)
        return replace(node, text=_PATTERN.sub(lambda match: self.text(match, node.place), node.text))

    def text(self, match: re.Match[str], place: Place) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] is None:
            raise _Unresolved("a ${ without its }; write $${ for the characters themselves")
        if "." in match[1].partition(":-")[0]:
            return self.key_text(match[1], place)
        variable = _VARIABLE.fullmatch(match[1])
        if not variable:
            raise _Unresolved(f"{match[0]} is neither ${{NAME}}, ${{NAME:-default}} nor ${{section.key}}")
        value = self.environ.get(variable[1])
        if variable[2] is not None:
            return value or variable[2]
        if value is None:
            raise _Unresolved(
                f"the environment variable {variable[1]} is not set; "
                f"set it, or write ${{{variable[1]}:-default}}"
            )
        return value

    def key_text(self, path: str, place: Place) -> str:
        node = self.key(path, place)
        if not isinstance(node, Scalar):
            raise _Unresolved(f"${{{path}}} is a list or mapping and cannot stand inside a text")
        if node.is_null:
            raise _Unresolved(f"${{{path}}} is null and cannot stand inside a text")
        return node.text


def default_node(path: str, place: Place) -> Node:
    """What one would write for the default of ``path``."""
    info = FIELDS[path]
    if info.is_required():
        raise _Unresolved(f"${{{path}}} is not set")
    return node_of(info.get_default(), place)


def node_of(value: Any, place: Place) -> Node:
    """A Python value as a node."""
    if isinstance(value, (tuple, list)):
        return ListNode(tuple(node_of(part, place) for part in value), place)
    if isinstance(value, dict):
        return MapNode(tuple(Entry(key, place, node_of(part, place)) for key, part in value.items()), place)
    if isinstance(value, str):
        return Scalar(value, place, plain=False)
    if value is None or isinstance(value, bool):
        return Scalar("null" if value is None else str(value).lower(), place)
    return Scalar(repr(value), place)


def _moved(node: Node, place: Place) -> Node:
    """``node`` as if it stood at ``place``, where a fault of its type has to be shown."""
    if isinstance(node, ListNode):
        return ListNode(tuple(_moved(item, place) for item in node.items), place)
    if isinstance(node, MapNode):
        return MapNode(
            tuple(replace(entry, value=_moved(entry.value, place)) for entry in node.entries), place
        )
    null_from_file = node.is_null and place == COMMAND_LINE
    return replace(node, text="null" if null_from_file else node.text, place=place)
