"""Text that comes in pieces, read by generators that yield where they need more of it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, NoReturn

Reading = Generator[None, None, None]
_PLAIN = re.compile(r"[-+.:,\s0-9a-zA-Z]*")
"""What stands between the brackets and strings of JSON."""
_STRING_END = re.compile(r'["\\]')
_MOST_JSON = 1 << 20
"""Longest arguments that are read, in characters."""


class NotSo(Exception):
    """The text is not what was looked for."""


class Cursor:
    """``text`` from ``place`` on is still to be read; ``ended``: no more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.ended = False

    def take(self) -> str:
        """All that is there."""
        taken, self.text, self.place = self.text[self.place :], "", 0
        return taken

    def forget(self) -> None:
        """What is read: nobody goes back behind ``place``."""
        self.text, self.place = self.text[self.place :], 0

    def more(self) -> Reading:
        if self.ended:
            raise NotSo
        yield

    def space(self) -> Reading:
        """Skip white space."""
        while True:
            while self.place < len(self.text) and self.text[self.place].isspace():
                self.place += 1
            if self.place < len(self.text) or self.ended:
                return
            yield

    def is_next(self, word: str) -> Generator[None, None, bool]:
        """Whether ``word`` follows, its white space in any amount; if so it is read."""
        start = self.place
        for part in word.split():
            yield from self.space()
            while len(self.text) - self.place < len(part) and part.startswith(self.text[self.place :]):
                if self.ended:
                    self.place = start
                    return False
                yield
            if not self.text.startswith(part, self.place):
                self.place = start
                return False
            self.place += len(part)
        return True

    def expect(self, word: str) -> Reading:
        if not (yield from self.is_next(word)):
            raise NotSo

    def until(self, word: str) -> Generator[None, None, str]:
        """The text up to ``word``, and read both. ``word`` has to come as it stands."""
        start = self.place
        while (found := self.text.find(word, start)) < 0:
            start = max(self.place, len(self.text) - len(word) + 1)
            yield from self.more()
        text = self.text[self.place : found]
        self.place = found + len(word)
        return text

    def json(self) -> Generator[None, None, Any]:
        """A JSON object or list."""
        yield from self.space()
        start = at = self.place
        depth = 0
        while True:
            while at >= len(self.text):
                yield from self.more()
            mark = self.text[at]
            if mark == '"' and depth:
                at = yield from self._string(at + 1)
            elif mark in "{[":
                depth, at = depth + 1, at + 1
            elif mark in "}]" and depth:
                depth, at = depth - 1, at + 1
                if not depth:
                    break
            else:
                plain = _PLAIN.match(self.text, at)
                if not depth or plain is None or not plain[0]:
                    raise NotSo
                at = plain.end()
        self.place = at
        if at - start > _MOST_JSON:
            raise NotSo
        return parsed(self.text[start:at])

    def _string(self, at: int) -> Generator[None, None, int]:
        """Where the string ends that goes on at ``at``."""
        while True:
            found = _STRING_END.search(self.text, at)
            if found is None:
                at = len(self.text)
            elif found[0] == '"':
                return found.end()
            elif found.end() < len(self.text):
                at = found.end() + 1
                continue
            else:
                at = found.start()
            yield from self.more()


def parsed(text: str) -> Any:
    """The value of JSON, in whose texts line ends may stand as they are.

    Raises:
        NotSo: it is none.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotSo from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)
