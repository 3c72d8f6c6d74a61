"""Token ids -> text, one id at a time: no broken characters, and no more work for a longer answer.

What comes out, end to end, is ``tokenizer.decode`` of all ids without its clean-up of spaces.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_REPLACED = "\ufffd"
"""What a decoder writes for bytes that are no character (yet)."""
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONGEST_CHARACTER = 8
"""After so many tokens bytes that are no character stay none: 4 bytes are the most."""


class Pieces(Protocol):
    """The text of ids that come one at a time."""

    def feed(self, token_id: int) -> str:
        """The text that is certain by this id, and has not been given."""
        ...

    def flush(self) -> str:
        """The rest: there are no more ids."""
        ...


def pieces(tokenizer: Any, *, skip_special: bool = True, keep: Collection[str] = ()) -> Pieces:
    """A new text. ``skip_special`` leaves special tokens out, but for those that one of ``keep`` holds."""
    table = _table(tokenizer)
    skipped = table.special if skip_special else {}
    if keep:
        kept = "\0".join(keep)
        skipped = {token_id: name for token_id, name in skipped.items() if name not in kept}
    return _BytePieces(table, skipped) if table.is_byte_level else _WindowPieces(table, skipped)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of one token as they stand inside a text, special or not; they may be part of a character."""
    table = _table(tokenizer)
    token = table.token(token_id)
    if token is None:
        return b""
    if table.is_byte_level:
        return table.bytes_of(token_id)
    if table.is_fallback_byte(token):
        return bytes([int(token[3:5], 16)])
    twice, once = table.text([token_id, token_id]), table.text([token_id])  # the first may lose a space
    return twice[len(once) :].encode("utf-8")


def _table(tokenizer: Any) -> _Table:
    table = _TABLES.get(tokenizer)
    if table is None:
        table = _TABLES[tokenizer] = _Table(tokenizer)
    return table


class _Table:
    """What is known of a tokenizer's tokens; shared by all its texts."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.special: dict[int, str] = {
            int(number): token.content for number, token in added.items() if token.special
        }
        decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
        self.is_byte_level = type(decoder).__name__ == "ByteLevel"
        self._falls_back = not tokenizer.is_fast or (
            decoder is not None and b"ByteFallback" in decoder.__getstate__()
        )
        self._token_of = tokenizer.convert_ids_to_tokens
        self._decode = tokenizer.decode
        self._bytes: dict[int, bytes] = {}

    def token(self, token_id: int) -> str | None:
        """The vocabulary's word; None for an id that the tokenizer lacks (models may have more rows)."""
        try:
            found = self._token_of(token_id)
        except (IndexError, KeyError, OverflowError):
            return None
        return found if isinstance(found, str) else None

    def is_fallback_byte(self, token: str) -> bool:
        return self._falls_back and _FALLBACK.fullmatch(token) is not None

    def text(self, ids: list[int]) -> str:
        return self._decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""

    def bytes_of(self, token_id: int) -> bytes:
        """A byte-level token's bytes: a letter for each, or the token as it stands (added ones)."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id) or ""
            codes = [_BYTE_OF.get(letter) for letter in token]
            known = [code for code in codes if code is not None]
            found = bytes(known) if len(known) == len(codes) else token.encode("utf-8")
            self._bytes[token_id] = found
        return found


_TABLES: WeakKeyDictionary[Any, _Table] = WeakKeyDictionary()


def _byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in set(printable)]
    return {chr(code): code for code in printable} | {chr(256 + n): code for n, code in enumerate(others)}


_BYTE_OF = _byte_letters()


class _BytePieces:
    """Of a byte-level vocabulary: tokens are bytes, and text is UTF-8."""

    def __init__(self, table: _Table, skipped: dict[int, str]) -> None:
        self._table, self._skipped = table, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._table.bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowPieces:
    """Of any other: the tokenizer decodes the newest ids behind a few older ones, and what they add is new.

    SentencePiece drops a space at the beginning of a text only, so the older ids must hold some of it. A run
    of fallback bytes is one unit: it is read as UTF-8 as a whole, or not at all.
    """

    def __init__(self, table: _Table, skipped: dict[int, str]) -> None:
        self._table, self._skipped = table, skipped
        self._before: list[int] = []
        self._text_before = ""
        self._latest: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        token = self._table.token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        return "" if self._table.is_fallback_byte(token) else self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        text = self._table.text(self._before + self._pending)[len(self._text_before) :]
        if text.endswith(_REPLACED) and not final and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        window = self._before + self._pending
        for before in (self._pending, self._latest + self._pending, window[-_LONGEST_CHARACTER:]):
            self._before, self._text_before = before, self._table.text(before)
            if self._text_before:
                break
        self._latest, self._pending = self._pending, []
        return text
