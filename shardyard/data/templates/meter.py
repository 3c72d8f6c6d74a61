"""What a rendering may cost: a budget of steps and sizes, and the price of what a template can do.

Prices are upper bounds, and are paid before a value is made where it could be much larger than what it is
made of. They depend on the row and the template alone, so that a row is refused on every machine or on none.
Processor time is limited too, for what is slow at a small price.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

from shardyard.data.dropped import NotUsable

BUDGET, BUDGET_PER_INPUT = 64 << 20, 256
"""What a rendering may cost, and for each unit of the size of what is rendered."""
VALUE, VALUE_PER_INPUT = 4 << 20, 16
"""What one value, and the output, may have as size; likewise."""
SECONDS = 10.0
"""Processor time of the rendering thread."""

ITEM = 64
"""The cost of a step and of a value beside its characters: about what an object takes in memory."""
_INT_BITS = 1 << 14
_WIDTH = 1000
"""Widest padding and indentation that a template may ask for."""

_CONTAINERS = (list, tuple, dict, set, type({}.keys()), type({}.values()), type({}.items()))
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_WIDE = re.compile(r"[%)][-#0 +]*(?:\*|\d{4})|\.(?:\*|\d{4})")
"""Where nothing like this stands no directive asks for a width beyond 999; unlike ``_PRINTF`` it is fast
whatever the text."""
_PAIRWISE = frozenset("lstrip rfind rindex rpartition rsplit rstrip strip".split())
"""Methods that may compare every character of the text with every one of their argument."""


class Stopped(NotUsable):
    """The template used more time or memory than it may."""


class Meter:
    """Counts one rendering after another; ``begin`` starts each."""

    def begin(self, variables: dict[str, Any]) -> int:
        """Start to meter a rendering of these values; gives the room of one value and of the output."""
        size = size_of(variables, BUDGET << 10)
        self._left = BUDGET + BUDGET_PER_INPUT * size
        self.room = VALUE + VALUE_PER_INPUT * size
        self._steps = 0
        self._stop_at = time.thread_time() + SECONDS
        return self.room

    def step(self, cost: int = 0) -> None:
        """One step of the template; also stands in front of the body of every loop."""
        self._left -= ITEM + cost
        self._steps += 1
        if self._left < 0:
            raise Stopped("the chat template was stopped: it takes too many steps, or too much memory")
        if not self._steps & 15 and time.thread_time() > self._stop_at:
            raise Stopped(f"the chat template was stopped: it ran longer than {SECONDS:g} s")

    def charge(self, size: int) -> None:
        """Pay for a value before it is made."""
        if size > self.room:
            raise Stopped("the chat template was stopped: it makes a value that is too large")
        self.step(size)

    def measured(self, value: Any) -> Any:
        """``value``, if it is not larger, as text, than a value may be."""
        if isinstance(value, _CONTAINERS):
            size_of(value, self.room)
        self.step()
        return value

    def made(self, value: Any) -> Any:
        """``value``, paid for; its parts exist already."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, _CONTAINERS):
            self.charge(ITEM * len(value))
        elif isinstance(value, int):
            self.check_number(value.bit_length())
        return value

    def literal(self, value: Any) -> Any:
        """A list, tuple or mapping that the template has just put together."""
        return self.made(self.measured(value))

    def written(self, value: Any) -> Any:
        """Jinja2's ``finalize``: called with each value before it is written as text."""
        self.charge(size_of(value, self.room))
        return value

    def joined(self, *parts: Any) -> str:
        """The operator ``~``."""
        self.charge(sum(size_of(part, self.room) for part in parts))
        return "".join(map(str, parts))

    def check_number(self, bits: int) -> None:
        """Raise Stopped for a whole number of that many bits, if they are too many to reckon with."""
        if bits > _INT_BITS:
            raise Stopped("the chat template was stopped: it makes a number that is too large")

    def check_printf(self, pattern: str, values: Any) -> None:
        """Pay for ``pattern % values``."""
        if _WIDE.search(pattern):
            # _PRINTF takes quadratic time for parentheses that stay open
            numbers = chain.from_iterable(_PRINTF.findall(pattern)) if len(pattern) <= _WIDTH else ["*"]
            if any(number == "*" or (number and int(number[:9]) > _WIDTH) for number in numbers):
                raise Stopped("the chat template was stopped: it pads text too far")
        self.charge(len(pattern) + pattern.count("%") * (size_of(values, self.room) + _WIDTH))

    def check_product(self, left: Any, right: Any) -> None:
        """Pay for ``left * right``."""
        if isinstance(left, int) and isinstance(right, int):
            self.check_number(left.bit_length() + right.bit_length())
            return
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                size = len(sequence) if isinstance(sequence, str) else size_of(sequence, self.room)
                self.charge(size * max(times, 0))

    def check_method(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Pay for a method of a text; gives its arguments, an iterator among them as a list."""
        if name == "replace":
            self.check_replace(text, *args[:2])
        elif name == "join" and args:
            items = self.listed(args[0])
            self.charge(size_of(items, self.room) + len(text) * len(items))
            return (items, *args[1:])
        elif name in ("split", "rsplit", "splitlines"):
            known = bool(args) and isinstance(args[0], str) and args[0] != ""
            pieces = text.count(args[0]) if known else len(text) // 2
            self.charge(min(ITEM * pieces, self.room) + len(text))
        elif name in ("partition", "rpartition"):
            self.charge(len(text))
        if name in _PAIRWISE:
            for sought in [*args, *kwargs.values()]:
                self.check_pairs(text, sought)
        return args

    def check_pairs(self, text: str, sought: Any) -> None:
        """Pay for a search that may hold each character of one text against each of the other."""
        if isinstance(sought, str) and len(sought) > ITEM:
            self.charge(len(text) * len(sought) // ITEM)

    def check_replace(self, text: str, old: Any = "", new: Any = "") -> None:
        """Pay for ``text.replace(old, new)``."""
        old, new = str(old), str(new)
        found = text.count(old) if old else len(text) + 1
        self.charge(len(text) + found * len(new))

    def listed(self, values: Any) -> list[Any]:
        """What an iterator gives."""
        items = list(values)
        self.charge(ITEM * len(items))
        return items

    def check_format(self, pattern: str, values: Iterable[Any]) -> None:
        """Pay for ``pattern.format(...)``."""
        fields = 0
        for _, field, spec, _ in string.Formatter().parse(pattern):
            fields += field is not None
            if spec and ("{" in spec or any(int(n[:9]) > _WIDTH for n in re.findall(r"\d+", spec))):
                raise Stopped("the chat template was stopped: it pads text too far")
        given = sum(size_of(value, self.room) for value in values)
        self.charge(len(pattern) + fields * (given + _WIDTH))


def width_of(asked: Any) -> int:
    """The number of characters of a width or of a text that is put in for one."""
    width = len(asked) if isinstance(asked, str) else int(asked)
    if width > _WIDTH:
        raise Stopped("the chat template was stopped: it pads text too far")
    return width


def size_of(value: Any, limit: int, indent: int = 0, depth: int = 0) -> int:
    """What ``value`` costs: about the characters of its text, parts that it holds twice counted twice.

    ``indent`` characters are added for each part and level. Raises Stopped above ``limit``.
    """
    if isinstance(value, str):
        return ITEM + len(value)
    if isinstance(value, int):
        return ITEM + value.bit_length() // 3
    total = ITEM
    if isinstance(value, _CONTAINERS):
        parts: Iterable[Any] = chain(value, value.values()) if isinstance(value, dict) else value
        for part in parts:
            total += depth * indent + size_of(part, limit - total, indent, depth + 1)
            if total > limit:
                raise Stopped("the chat template was stopped: it makes a value that is too large")
    return total
