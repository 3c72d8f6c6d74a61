"""A node becomes a value of its field's type: YAML 1.2 numbers, strict booleans, null where it may be."""

from __future__ import annotations

import json
import math
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardyard.config.source import Entry, ListNode, MapNode, Node, Notes, Place, Scalar
from shardyard.config.yaml_source import MAX_DEPTH, compose_flow

TRUE_WORDS = frozenset({"true", "yes", "on", "t", "y", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "f", "n", "0"})
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.?inf|\.?nan", re.IGNORECASE)
_INT_LIMIT = 2**63


class ValueFault(ValueError):
    """A text that is not a value of its field's type; the message says what is wanted."""


@dataclass(frozen=True)
class Kind:
    """The type of a field, taken apart.

    ``scalars`` holds the Python types a single text may become, ``choices`` the words it may be; ``item`` is
    the type of a list's items, if a list may stand there; ``mapping`` and ``optional`` say whether a mapping
    or null may. ``path`` and ``keep_empty`` are those of :func:`shardyard.config.sections.base.setting`.
    """

    scalars: frozenset[type] = frozenset()
    choices: tuple[str, ...] = ()
    item: Kind | None = None
    mapping: bool = False
    optional: bool = False
    path: bool = False
    keep_empty: bool = False
    required: bool = False

    def describe(self) -> str:
        """The type in words, as the documentation shows it."""
        words = [*self.choices]
        words += [name for kind, name in _NAMES if kind in self.scalars]
        if self.item:
            words.append(f"list of {self.item.describe()}")
        if self.mapping:
            words.append("mapping")
        return " | ".join([*words, "null"] if self.optional else words)

    def is_switch(self) -> bool:
        """Whether a bare ``--section.key`` means true."""
        return bool in self.scalars


_NAMES = ((bool, "true | false"), (int, "integer"), (float, "number"), (str, "text"))


def kind_of(info: FieldInfo) -> Kind:
    """The kind of a declared field."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return replace(
        _kind(info.annotation),
        path=bool(extra.get("path")),
        keep_empty=bool(extra.get("keep_empty")),
        required=info.is_required(),
    )


def _kind(annotation: Any) -> Kind:
    origin = get_origin(annotation)
    if annotation is None or annotation is types.NoneType:
        return Kind(optional=True)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        kind = Kind()
        for part in map(_kind, get_args(annotation)):
            kind = Kind(
                kind.scalars | part.scalars,
                kind.choices + part.choices,
                kind.item or part.item,
                kind.mapping or part.mapping,
                kind.optional or part.optional,
            )
        return kind
    if origin is Literal:
        return Kind(choices=get_args(annotation))
    if origin is tuple:
        return Kind(item=_kind(get_args(annotation)[0]))
    if origin is dict:
        return Kind(mapping=True)
    if annotation in (bool, int, float, str):
        return Kind(scalars=frozenset({annotation}))
    raise TypeError(f"a config field cannot have the type {annotation}")


def read_value(node: Node, kind: Kind, path: str, notes: Notes) -> Any:
    """The value of ``node`` for a field of ``kind``; faults and warnings go to ``notes``.

    Returns None for null and for a faulty value; ask ``notes`` which.
    """
    if not isinstance(node, Scalar):
        return _read_collection(node, kind, path, notes)
    if not _is_flow(node.text, kind):
        return _read_scalar(node, kind, path, notes)
    flow = _flow(node, path, notes)
    if flow is not None:
        return read_value(flow, kind, path, notes)
    fault = f"{_shown(node.text)} is neither JSON nor flow YAML; check its brackets and quotes"
    notes.fault(node.place, path, fault)
    return None


def _read_collection(node: ListNode | MapNode, kind: Kind, path: str, notes: Notes) -> Any:
    fault = ""
    if isinstance(node, MapNode):
        if kind.mapping:
            return untyped(node)
        fault = f"a mapping, but {_wanted(kind)} is wanted"
    elif kind.item is None:
        fault = f"a list, but {_wanted(kind)} is wanted"
    elif not node.items:
        hint = "null or leave the key out" if kind.optional else "leave the key out for the default"
        fault = f"an empty list; give at least one item, or {hint}"
    else:
        item = replace(kind.item, path=kind.path)
        return tuple(read_value(part, item, f"{path}[{i}]", notes) for i, part in enumerate(node.items))
    notes.fault(node.place, path, fault)
    return None


def _is_flow(text: str, kind: Kind) -> bool:
    """Whether a text stands for a mapping or list, as JSON does on a command line."""
    text = text.strip()
    return (kind.mapping and text.startswith("{")) or (kind.item is not None and text[:1] + text[-1:] == "[]")


def _flow(node: Scalar, path: str, notes: Notes) -> Node | None:
    """The nodes of a JSON text, or else of a flow YAML text; None if it is neither."""
    text = node.text.strip()
    try:
        return _from_json(json.loads(text, object_pairs_hook=_Pairs), node.place, path, notes)
    except (ValueError, RecursionError):
        return compose_flow(text, path, notes, node.place)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that duplicate keys are seen."""


def _from_json(value: Any, place: Place, path: str, notes: Notes, depth: int = 0) -> Node:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, _Pairs):
        entries: dict[str, Entry] = {}
        for key, part in value:
            if key in entries:
                notes.fault(place, path, f"{key!r} is written twice; keep one")
            entries[key] = Entry(key, place, _from_json(part, place, path, notes, depth + 1))
        return MapNode(tuple(entries.values()), place)
    if isinstance(value, list):
        return ListNode(tuple(_from_json(part, place, path, notes, depth + 1) for part in value), place)
    if isinstance(value, str):
        return Scalar(value, place, plain=False)
    return Scalar(json.dumps(value), place)


def _read_scalar(node: Scalar, kind: Kind, path: str, notes: Notes) -> Any:
    text = node.text
    none_word = node.plain and text in ("None", "none") and text not in kind.choices
    if node.is_null or none_word or (not text and not kind.keep_empty):
        if not kind.optional:
            found = text if none_word else "null" if node.is_null else "an empty text"
            hint = "it has no default" if kind.required else "leave the key out for its default"
            notes.fault(node.place, path, f"{found}, but {_wanted(kind)} is wanted; {hint}")
        elif none_word:
            notes.warn(node.place, path, f"the word {text} is read as null; write null")
        return None
    if kind.item and not kind.scalars:
        value = read_value(node, replace(kind.item, path=kind.path), path, notes)
        return (value,)
    try:
        return parse_text(text, kind)
    except ValueFault as fault:
        notes.fault(node.place, path, str(fault))
        return None


def parse_text(text: str, kind: Kind) -> Any:
    """``text`` as a choice, boolean, number or text of ``kind``, in that order.

    Raises:
        ValueFault: it is none of them.
    """
    if text in kind.choices:
        return text
    lowered = {choice.lower(): choice for choice in kind.choices}
    if bool in kind.scalars and kind.choices and text.lower() in lowered:
        return lowered[text.lower()]
    if {int, float} <= kind.scalars:  # the spelling tells a count from a share
        return read_int(text) if _INTEGER.fullmatch(text.strip()) else read_float(text.strip())
    if {bool, int} <= kind.scalars and _INTEGER.fullmatch(text.strip()) and text.strip() not in ("0", "1"):
        return read_int(text.strip())
    readers: list[tuple[type, Callable[[str], Any]]] = [
        (bool, read_bool),
        (int, read_int),
        (float, read_float),
    ]
    for scalar, read in readers:
        if scalar in kind.scalars:
            try:
                return read(text.strip())
            except ValueFault:
                if not kind.choices:
                    raise
    if str in kind.scalars:
        return os.path.expanduser(text) if kind.path else text
    if kind.choices:
        words = [*kind.choices, *(("true", "false") if bool in kind.scalars else ())]
        raise ValueFault(f"{_shown(text)} is not one of {', '.join(words)}")
    raise ValueFault(f"{_shown(text)}, but {_wanted(kind)} is wanted")


def read_bool(text: str) -> bool:
    """true/false, yes/no, on/off, t/f, y/n, 1/0 in any case.

    Raises:
        ValueFault: anything else.
    """
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueFault(f"{_shown(text)} is not a boolean; write true or false")


def read_int(text: str) -> int:
    """A YAML 1.2 integer, or a number text with an integral value (``5.0``, ``1e3``).

    Raises:
        ValueFault: anything else, or beyond 64 bits.
    """
    if _INTEGER.fullmatch(text) and len(text) < 25:
        value = int(text)
    elif _PREFIXED.fullmatch(text) and len(text) < 25:
        value = int(text, 0)
    elif _DECIMAL.fullmatch(text):
        number = read_float(text)
        if not number.is_integer():
            raise ValueFault(f"{_shown(text)} is not a whole number")
        value = int(number)
    else:
        raise ValueFault(f"{_shown(text)} is not a whole number{_underscore_hint(text)}")
    if abs(value) >= _INT_LIMIT:
        raise ValueFault(f"{_shown(text)} is too large")
    return value


def read_float(text: str) -> float:
    """A finite YAML 1.2 number: ``1e-5``, ``.5``, ``2E-4``, ``3``.

    Raises:
        ValueFault: anything else, NaN and infinity included.
    """
    if _PREFIXED.fullmatch(text):
        return float(read_int(text))
    if not _DECIMAL.fullmatch(text):
        if _NOT_FINITE.fullmatch(text):
            raise ValueFault(f"{_shown(text)} is not a finite number")
        raise ValueFault(f"{_shown(text)} is not a number{_underscore_hint(text)}")
    value = float(text)
    if not math.isfinite(value):
        raise ValueFault(f"{_shown(text)} is too large")
    return value


def untyped(node: Node) -> Any:
    """The value of a node inside a free mapping: YAML 1.2's core schema, so ``no`` and dates stay text."""
    if isinstance(node, MapNode):
        return {entry.key: untyped(entry.value) for entry in node.entries}
    if isinstance(node, ListNode):
        return [untyped(item) for item in node.items]
    if not node.plain:
        return node.text
    if node.is_null or not node.text:
        return None
    if node.text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return node.text.lower() == "true"
    try:
        if _INTEGER.fullmatch(node.text):
            return int(node.text)
        return read_int(node.text) if _PREFIXED.fullmatch(node.text) else read_float(node.text)
    except ValueFault:
        return node.text


def _underscore_hint(text: str) -> str:
    bare = text.replace("_", "")
    return f"; write {bare}" if "_" in text and _DECIMAL.fullmatch(bare) else ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _wanted(kind: Kind) -> str:
    words = replace(kind, optional=False).describe()
    return f"one of {words}" if kind.choices else words
