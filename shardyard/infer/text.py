"""The text of an answer as its tokens come, up to the first stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shardyard.infer.detokenize import pieces


def begun(text: str, words: Collection[str]) -> int:
    """How many of the last characters of ``text`` may be the beginning of one of ``words``: the most, and
    fewer than the word has.
    """
    longest = 0
    for word in words:
        start = max(len(text) - len(word) + 1, 0)
        while (start := text.find(word[0], start)) >= 0:
            if word.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest


class TextStream:
    """``feed`` takes the tokens of an answer and gives its text; ``flush`` the rest, once.

    The pieces are ``tokenizer.decode`` of all tokens (without the clean-up of spaces), cut before the stop
    text that is complete first (of two that end at the same character, before the longer), whatever the
    tokens are. What may be the beginning of a stop text is held back.

    ``skip_special`` leaves special tokens out, but for those that one of ``keep`` holds (the marks of calls:
    `ReplyFormat.marks`). ``include_stop`` cuts behind the stop text.

    Raises:
        ValueError: an empty stop text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        include_stop: bool = False,
        keep: Collection[str] = (),
    ) -> None:
        if not all(stop):
            raise ValueError("stop: an empty text")
        self._pieces = pieces(tokenizer, skip_special=skip_special, keep=keep)
        self._stop = tuple(dict.fromkeys(stop))
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None
        """The stop text that has come."""

    @property
    def finished(self) -> bool:
        """Whether a stop text has come: nothing follows."""
        return self.stopped_by is not None

    def feed(self, token_id: int) -> str:
        """The text that is certain by this token; "" once it is finished."""
        if self.finished:
            return ""
        return self._passed(self._pieces.feed(token_id))

    def flush(self) -> str:
        """What was held back: there are no more tokens."""
        if self.finished:
            return ""
        text = self._passed(self._pieces.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _passed(self, new: str) -> str:
        if not new or not self._stop:
            return new
        text = self._held + new
        found = [(place + len(word), place, word) for word in self._stop if (place := text.find(word)) >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        kept = begun(text, self._stop)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]
