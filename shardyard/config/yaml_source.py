"""YAML text -> nodes that know their line and column, by PyYAML's composer and nothing of its constructors.

So no value is interpreted here: what a text means is decided by the type of its field.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from shardyard.config.source import NULL_WORDS, Entry, ListNode, MapNode, Node, Notes, Place, Scalar
from shardyard.errors import UserError

_COMPOSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = {
    _CORE + name
    for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value")
}
_MAX_NODES = 100_000
MAX_DEPTH = 100
"""Levels of lists and mappings within each other; more is refused before Python's own limit is met."""


def read_yaml(path: str, notes: Notes) -> MapNode:
    """Compose the file at ``path``; an empty file is an empty mapping.

    Recoverable mistakes (duplicate keys, tags, several documents) go to ``notes``.

    Raises:
        UserError: the file cannot be read, is not UTF-8, is not YAML or is not a mapping.
    """
    roots = _compose_all(_read_text(path), path)
    start = Place(path, 1, 1)
    if len(roots) > 1:
        mark = roots[1].start_mark
        raise UserError(
            f"{Place(path, mark.line + 1, 1)}  a second YAML document begins here; keep one document per file"
        )
    if not roots or (isinstance(roots[0], yaml.ScalarNode) and _scalar(roots[0], start).is_null):
        return MapNode((), start)
    node = _Converter(path, notes).convert(roots[0], "")
    if not isinstance(node, MapNode):
        raise UserError(
            f"{node.place}  the file must be a mapping of sections (model, data, parallel, training, "
            "optimization), like `training:` with indented keys below it"
        )
    return node


def compose_flow(text: str, path: str, notes: Notes, place: Place) -> Node | None:
    """Nodes of a flow value such as ``{type: yarn}``, all at ``place``; None if it is not YAML."""
    try:
        roots = list(yaml.compose_all(text, Loader=_COMPOSER))
    except (yaml.YAMLError, RecursionError):
        return None
    return _Converter(place.file, notes, fixed=place).convert(roots[0], path) if len(roots) == 1 else None


def _read_text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}  not UTF-8 text; save the file as UTF-8") from None


def _compose_all(text: str, file: str) -> list[yaml.Node]:
    try:
        return [root for root in yaml.compose_all(text, Loader=_COMPOSER) if root is not None]
    except RecursionError:
        raise UserError(f"{file}: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise UserError(_syntax_message(text, file, error)) from None
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not YAML: {' '.join(str(error).split())}") from None


def _syntax_message(text: str, file: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{file}: not YAML: {error.problem}"
    place = Place(file, mark.line + 1, mark.column + 1)
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return f"{place}  a tab cannot indent YAML; use spaces"
    hint = ""
    if ".{" in written or "${" in written:
        hint = " (between [ ] or { }, text with braces needs quotes)"
    elif any(word in f"{error.context} {error.problem}" for word in ("anchor", "alias")):
        hint = " (a value that begins with * or & needs quotes)"
    return f"{place}  not YAML: {error.problem}{hint}"


def _scalar(node: yaml.ScalarNode, place: Place) -> Scalar:
    text = node.value
    explicit_text = node.tag == _CORE + "str" and (text in NULL_WORDS or not text)
    return Scalar(text, place, plain=not node.style and not explicit_text)


class _Converter:
    """PyYAML nodes -> ours: anchors are expanded, merge keys merged, everything unusual is refused."""

    def __init__(self, file: str | None, notes: Notes, fixed: Place | None = None) -> None:
        self.file, self.notes, self.fixed = file, notes, fixed
        self.count = 0
        self.open: list[int] = []

    def convert(self, node: yaml.Node, path: str) -> Node:
        place = self.place(node)
        self.count += 1
        if self.count > _MAX_NODES:
            raise UserError(f"{place}  more than {_MAX_NODES} values after expanding aliases (*name)")
        if node.tag not in _PLAIN_TAGS:
            self.notes.fault(place, path, f"tag {node.tag} is not supported; write plain values")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, place)
        if len(self.open) > MAX_DEPTH:
            raise UserError(f"{place}  {path}: lists and mappings lie more than {MAX_DEPTH} deep")
        if id(node) in self.open:
            raise UserError(f"{place}  an anchor (&name) contains itself")
        self.open.append(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return ListNode(tuple(self.convert(item, path) for item in node.value), place)
            return MapNode(tuple(self.entries(node, path).values()), place)
        finally:
            self.open.pop()

    def entries(self, node: yaml.Node, path: str) -> dict[str, Entry]:
        own: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key_place = self.place(key_node)
            if key_node.tag == _CORE + "merge" and not key_node.style:
                self.merge(value_node, merged, path)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or _scalar(key_node, key_place).is_null:
                self.notes.fault(key_place, path, "a key must be a word")
                continue
            inner = f"{path}.{key_node.value}" if path else key_node.value
            entry = Entry(key_node.value, key_place, self.convert(value_node, inner))
            if entry.key in own:
                first = own[entry.key].place
                where = "" if self.fixed else f", first in line {first.line}"
                self.notes.fault(key_place, inner, f"written twice{where}; keep one")
                continue
            own[entry.key] = entry
        return {**merged, **own}

    def merge(self, node: yaml.Node, merged: dict[str, Entry], path: str) -> None:
        """``<<: *base`` or ``<<: [*a, *b]``: of several, the first that has a key wins."""
        value = self.convert(node, path)
        for source in value.items if isinstance(value, ListNode) else (value,):
            if not isinstance(source, MapNode):
                self.notes.fault(source.place, path, "a merge key takes a mapping, or a list of mappings")
                continue
            for entry in source.entries:
                merged.setdefault(entry.key, entry)

    def place(self, node: yaml.Node) -> Place:
        mark = node.start_mark
        return self.fixed or Place(self.file, mark.line + 1, mark.column + 1)
