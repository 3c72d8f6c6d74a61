"""The terminal of a chat: what is typed, and how answers look."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from shardyard.infer.replies import Delta

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_QUOTES = '"""'
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Letters that would steer the terminal: an answer may hold any."""


class Keyboard:
    """Reads messages: from a terminal with editing and history, else a line each.

    A line that ends in a backslash goes on in the next one; between lines of three quotes all is one message.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()
        self.was_block = False
        """Whether the last message came between quotes: it is no command then."""
        if self._is_terminal:
            with suppress(ImportError):  # a Python without it reads plain lines
                import readline  # noqa: F401  (input() edits with it)

    def read(self) -> str | None:
        """The next message; None at the end of the input."""
        line = self._line("> ")
        if line is None:
            return None
        self.was_block = line.strip() == _QUOTES
        lines: list[str] = []
        if self.was_block:
            while (line := self._line(". ")) is not None and line.strip() != _QUOTES:
                lines.append(line)
            return "\n".join(lines)
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join([*lines, line] if line is not None else lines)

    def _line(self, prompt: str) -> str | None:
        if self._is_terminal:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


class Screen:
    """Shows an answer as it comes. ``thoughts``: False leaves them out."""

    def __init__(self, *, thoughts: bool, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._dims = self._is_terminal and "NO_COLOR" not in os.environ
        self._thoughts = thoughts
        self._in_thought = self._in_line = False

    def show(self, delta: Delta) -> None:
        """The next piece of an answer."""
        if delta.reasoning and self._thoughts:
            if not self._in_thought:
                self._in_thought = True
                self._write(_DIM if self._dims else "<think>\n")
            self._text(delta.reasoning)
        if delta.content or delta.call is not None:
            self._end_thought()
        self._text(delta.content)
        if delta.call is not None:
            self._new_line()
            arguments = json.dumps(delta.call.arguments, ensure_ascii=False)
            self._text(f"[call] {delta.call.name}({arguments})\n")
        self._out.flush()

    def end(self) -> None:
        """The answer is there."""
        self._end_thought()
        self._new_line()
        self._out.flush()

    def _end_thought(self) -> None:
        if self._in_thought:
            self._in_thought = False
            self._new_line()
            self._write(_PLAIN + "\n" if self._dims else "</think>\n")

    def _new_line(self) -> None:
        if self._in_line:
            self._text("\n")

    def _text(self, text: str) -> None:
        if text:
            self._write(text.translate(_CONTROLS) if self._is_terminal else text)
            self._in_line = not text.endswith("\n")

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding))
