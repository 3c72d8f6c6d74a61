"""What a user wrote, before it has a type: scalars, lists and mappings that know where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

NULL_WORDS = frozenset({"null", "Null", "NULL", "~"})


@dataclass(frozen=True)
class Place:
    """``file:line:col`` (counted from 1; line 0 is the file as a whole), or the command line."""

    file: str | None = None
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.file is None:
            return "command line"
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


COMMAND_LINE = Place()


@dataclass(frozen=True)
class Scalar:
    """Text as written; quoted text (``plain`` false) is never null, a number or a boolean by itself."""

    text: str
    place: Place
    plain: bool = True

    @property
    def is_null(self) -> bool:
        """Whether this is YAML's null: an unquoted ``null``, ``~`` or nothing at all."""
        empty = not self.text and self.place.file is not None
        return self.plain and (empty or self.text in NULL_WORDS)


@dataclass(frozen=True)
class ListNode:
    """A list, or the several words of one option."""

    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """A key of a mapping, with its own place."""

    key: str
    place: Place
    value: Node


@dataclass(frozen=True)
class MapNode:
    """A mapping; its keys are distinct."""

    entries: tuple[Entry, ...]
    place: Place


Node = Scalar | ListNode | MapNode


@dataclass(frozen=True)
class Fault:
    """One mistake: where, which key (may be empty for a fault of the file itself), and what."""

    place: Place
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}  {self.path}: {self.text}" if self.path else f"{self.place}  {self.text}"


@dataclass
class Notes:
    """The faults and warnings found so far; everything is collected so that a user sees all at once."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fault(self, place: Place, path: str, text: str) -> None:
        """Record a mistake."""
        self.faults.append(Fault(place, path, text))

    def warn(self, place: Place | None, path: str, text: str) -> None:
        """Record a warning; ``place`` is None for a default."""
        self.warnings.append(f"{place}  {path}: {text}" if place else f"{path}: {text}")

    def faulty_paths(self) -> set[str]:
        """The ``section.key`` names that have a fault, without list or mapping subscripts."""
        return {".".join(fault.path.split("[")[0].split(".")[:2]) for fault in self.faults}


def scalars(node: Node) -> Iterator[Scalar]:
    """Every scalar below ``node``, in order."""
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, ListNode):
        for item in node.items:
            yield from scalars(item)
    else:
        for entry in node.entries:
            yield from scalars(entry.value)
