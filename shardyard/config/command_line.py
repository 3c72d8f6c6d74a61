"""Words of the command line -> one YAML file and overrides, each with the text that was written.

``--section.key value``, ``--section.key=value``, ``section.key=value``; a bare boolean ``--section.key`` is
true; a list takes several words. Nothing is abbreviated: a key is written whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardyard.config.schema import FIELDS
from shardyard.config.source import COMMAND_LINE, ListNode, Node, Notes, Scalar
from shardyard.config.suggest import MOVED, suggest
from shardyard.config.values import Kind, kind_of

_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_YAML_SUFFIXES = (".yaml", ".yml")


@dataclass
class CommandLine:
    """The words, sorted: at most one file, and ``section.key`` -> node (of several, the last)."""

    file: str | None = None
    overrides: dict[str, Node] = field(default_factory=dict)


def parse_command_line(argv: Sequence[str], notes: Notes) -> CommandLine:
    """Sort the words of ``argv``; what is not understood becomes a fault in ``notes``."""
    result = CommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        assignment = _ASSIGNMENT.fullmatch(word)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            words = [value] if equals else _take_words(rest, _kind(key))
            _add(result, key, words, notes)
        elif assignment:
            _add(result, assignment[1], [assignment[2]], notes)
        elif not word.endswith(_YAML_SUFFIXES):
            notes.fault(
                COMMAND_LINE, "", f"unexpected word {word!r}; settings are written --section.key value"
            )
        elif result.file is not None:
            notes.fault(COMMAND_LINE, "", f"two YAML files, {result.file} and {word}; give one")
        else:
            result.file = word
    return result


def _kind(key: str) -> Kind | None:
    path = MOVED.get(key.rpartition(".")[2], key)
    return kind_of(FIELDS[path]) if path in FIELDS else None


def _take_words(rest: list[str], kind: Kind | None) -> list[str]:
    """Remove from ``rest`` the words that belong to an option of ``kind`` (None: unknown option)."""
    many = kind is None or kind.item is not None
    taken: list[str] = []
    while rest and not rest[0].startswith("--"):
        ends = rest[0].endswith(_YAML_SUFFIXES) or _ASSIGNMENT.fullmatch(rest[0]) is not None
        required = kind is not None and not kind.is_switch() and not taken
        if ends and not required:
            break
        taken.append(rest.pop(0))
        if not many:
            break
    return taken


def _add(result: CommandLine, key: str, words: list[str], notes: Notes) -> None:
    kind = _kind(key)
    if kind is None:
        notes.fault(COMMAND_LINE, key, _unknown(key))
        return
    if not words and not kind.is_switch():
        notes.fault(
            COMMAND_LINE, key, "needs a value; one that begins with -- is written --section.key=value"
        )
        return
    nodes = tuple(Scalar(word, COMMAND_LINE) for word in words or ["true"])
    result.overrides.pop(key, None)
    result.overrides[key] = nodes[0] if len(nodes) == 1 else ListNode(nodes, COMMAND_LINE)


def _unknown(key: str) -> str:
    parent = ".".join(re.split(r"[.\[]", key)[:2])
    if parent in FIELDS and parent != key and not key.endswith(":"):
        return f"lists and mappings are replaced whole; write {parent}=... with the new value (JSON)"
    return f"unknown key{suggest(key)}"
