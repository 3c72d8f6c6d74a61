"""Rows of json and jsonl files, and lines of text, in a stream."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardyard.data.sources.files import CHUNK, open_bytes
from shardyard.data.sources.row import BadRow, Row, Rows, Skip, malformed
from shardyard.errors import UserError

_SPACE = " \t\r\n"
_BOM = b"\xef\xbb\xbf"
_TOO_LONG = "a whole number of more digits than Python reads (4,300)"

_DECODER = json.JSONDecoder()

_LOOKAHEAD = 16
"""Characters that JSON's longest token other than a text and a number, ``-Infinity``, and a cut-off escape
fit in."""


def lines(file: Path, skip: Skip) -> Iterator[tuple[str | BadRow, str]]:
    """The lines of a text file that are not blank, without their line ends, and ``file:line`` of each.

    Only ``\\n`` and ``\\r\\n`` end a line: the other characters that Unicode counts as line ends belong to
    the text. A line that is not UTF-8 is a bad row.
    """
    with open_bytes(file) as stream:
        for number, raw in enumerate(stream, start=1):
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if is_blank(raw) or skip.takes_one():
                continue
            where = f"{file}:{number}"
            try:
                line: str | BadRow = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                line = not_utf8(where, error.reason, error.start)
            yield line, where


def not_utf8(where: str, reason: str, byte: int) -> BadRow:
    """The bad row of bytes that are no text."""
    advice = f"not UTF-8 text ({reason} at byte {byte}); convert it to UTF-8"
    return BadRow("not UTF-8 text", where, advice)


def jsonl_rows(file: Path, skip: Skip) -> Rows:
    """An object per line; skipped lines are not parsed."""
    for line, where in lines(file, skip):
        yield line if isinstance(line, BadRow) else row_of_line(line, where)


def json_rows(file: Path, skip: Skip) -> Rows:
    """A JSON array of objects, read element by element; or one object per line, as some name such files."""
    if _begins_with(file, b"["):
        with open_bytes(file) as stream:
            yield from _array_rows(_Window(file, stream), skip)
    else:
        yield from jsonl_rows(file, skip)


def _begins_with(file: Path, mark: bytes) -> bool:
    """Whether this is the first of a file's bytes that is no space."""
    with open_bytes(file) as stream:
        chunk = stream.read(CHUNK).removeprefix(_BOM)
        while chunk and not chunk.strip():
            chunk = stream.read(CHUNK)
    return chunk.lstrip().startswith(mark)


def is_blank(raw: bytes) -> bool:
    """Whether a line holds nothing but what Unicode counts as space."""
    stripped = raw.strip()
    if not stripped:
        return True
    if 0x20 < stripped[0] < 0x7F:
        return False
    return not stripped.decode("utf-8", "replace").strip()


def row_of_line(line: str, where: str) -> Row | BadRow:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return malformed(where, error.msg, error.colno)
    except RecursionError:
        return BadRow("nested too deeply", where, "the row is nested too deeply")
    except ValueError:
        return BadRow(_TOO_LONG, where, f"{_TOO_LONG}; write it as text")
    return _as_row(value, where)


def _as_row(value: Any, where: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, where)
    found = type(value).__name__
    return BadRow("not an object", where, f"a row must be an object with named columns, found {found}")


def _array_rows(window: _Window, skip: Skip) -> Rows:
    """Malformed JSON ends an array under any policy: where the next row begins cannot be told."""
    window.skip_space()
    window.advance(1)
    window.skip_space()
    expect_row = not window.at("]")
    while expect_row:
        where = window.where()
        value = window.parse()
        if not skip.takes_one():
            yield _as_row(value, where)
        window.skip_space()
        expect_row = window.at(",")
        if expect_row:
            window.advance(1)
            window.skip_space()
    where = window.where()
    if not window.at("]"):
        raise UserError(f"{where}: not valid JSON: ',' or ']' must follow a row; is the file cut off?")
    window.advance(1)
    window.skip_space()
    if not window.is_empty:
        raise UserError(f"{where}: not valid JSON: something follows the end of the array")


class _Window:
    """The part of a JSON text between what is parsed and what is read, and where in the file it stands."""

    def __init__(self, file: Path, stream: io.BufferedReader) -> None:
        self._file = file
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._bytes_read = 0
        self._ended = False
        self._text = ""
        self._position = 0
        self._line = 1
        self._line_start = 0
        """Where in ``_text`` the line of ``_position`` begins; negative: before it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of the file."""
        return self._position >= len(self._text) and not self._read_on()

    def at(self, character: str) -> bool:
        """Whether this character comes next."""
        return not self.is_empty and self._text[self._position] == character

    def where(self) -> str:
        """``file:line`` of what comes next."""
        return f"{self._file}:{self._line}"

    def advance(self, count: int) -> None:
        """Leave ``count`` characters behind."""
        end = self._position + count
        newlines = self._text.count("\n", self._position, end)
        if newlines:
            self._line += newlines
            self._line_start = self._text.rindex("\n", self._position, end) + 1
        self._position = end

    def skip_space(self) -> None:
        """Go to the next character that means something."""
        while not self.is_empty:
            end = self._position
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self.advance(end - self._position)
            if self._position < len(self._text):
                return

    def parse(self) -> Any:
        """The next JSON value. Reads on only while what there is may be the beginning of one.

        Raises:
            UserError: it is malformed.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _LOOKAHEAD
                before = error.pos - self._position
                if cut_off and self._read_on():
                    continue
                raise self._malformed(error.msg, before) from error
            except RecursionError as error:
                raise UserError(f"{self.where()}: the row is nested too deeply") from error
            except ValueError as error:
                raise UserError(f"{self.where()}: {_TOO_LONG}; write it as text") from error
            length = end - self._position
            if end == len(self._text) and self._text[end - 1] not in "}]" and self._read_on():
                continue  # a number may go on
            self.advance(length)
            return value

    def _malformed(self, message: str, before: int) -> UserError:
        """The error ``before`` characters further on."""
        self.advance(before)
        return malformed(self.where(), message, self._position - self._line_start + 1).error()

    def _read_on(self) -> bool:
        """Read at least as much as is waiting, so that a long row is parsed few times; false at the end."""
        self._text = self._text[self._position :]
        self._line_start -= self._position
        self._position = 0
        wanted = max(CHUNK, len(self._text))
        parts = [self._text]
        while wanted > 0 and not self._ended:
            parts.append(self._next_text())
            wanted -= len(parts[-1])
        self._text, before = "".join(parts), len(self._text)
        return len(self._text) > before

    def _next_text(self) -> str:
        begin = self._bytes_read - len(self._decode.getstate()[0])
        raw = self._stream.read(CHUNK)
        self._bytes_read += len(raw)
        self._ended = not raw
        try:
            text = self._decode.decode(raw, final=self._ended)
            return text.removeprefix("\ufeff") if begin == 0 else text
        except UnicodeDecodeError as error:
            raise not_utf8(str(self._file), error.reason, begin + error.start).error() from error
