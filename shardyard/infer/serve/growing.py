"""One answer as its tokens come: its thought, words and calls, and what each token was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardyard.infer.detokenize import token_bytes
from shardyard.infer.replies import Delta, ReplyParser
from shardyard.infer.serve.subject import Ask
from shardyard.infer.text import TextStream
from shardyard.infer.types import Event, Finished, Token

_LOWEST = -9999.0
"""OpenAI's word for a token that cannot be: JSON has no infinity."""


@dataclass(frozen=True)
class Shown:
    """A token of an answer for a client: its bytes, and where it begins in the answer's text."""

    bytes: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass
class Piece:
    """What is new of an answer. ``reason``: of its end."""

    deltas: list[Delta] = field(default_factory=list)
    tokens: list[Shown] = field(default_factory=list)
    reason: str | None = None
    error: str = ""
    count: int = 0
    """Tokens that the model has made for it, the stop token included."""

    def add(self, later: Piece) -> None:
        self.deltas += later.deltas
        self.tokens += later.tokens
        self.reason, self.error = later.reason or self.reason, later.error or self.error
        self.count += later.count

    @property
    def text(self) -> str:
        return "".join(delta.content for delta in self.deltas)


class Growing:
    """``take`` makes a piece of each event, up to the end; nothing comes behind it."""

    def __init__(self, ask: Ask, tokenizer: Any) -> None:
        self._ask, self._tokenizer = ask, tokenizer
        marks = ask.replies.marks if ask.replies is not None else ()
        self._stream = TextStream(tokenizer, ask.stop, keep=marks)
        self._parser = None
        if ask.replies is not None:
            self._parser = ReplyParser(ask.replies, tools=ask.tools, in_thought=ask.in_thought)
        self._pending: list[tuple[Shown, int]] = []
        """Tokens whose text has not gone out, each with the byte where it begins."""
        self._bytes = self._characters = 0
        """Of the tokens so far."""
        self._text_bytes = 0
        """Of the text so far, which a stop text may have cut."""
        self.has_calls = False
        self.ended = False

    def take(self, event: Event) -> Piece:
        """What the event adds; ``ended`` is set when it was the last one, or a stop text is complete."""
        if isinstance(event, Finished):
            return self._end(self._stream.flush(), event.reason, event.error)
        text = ""
        if event.id not in self._ask.request.sampling.stop_ids:
            text = self._stream.feed(event.id)
            if event.logprob is not None:
                self._note(event)
        piece = self._end(text, "stop") if self._stream.finished else self._passed(text)
        piece.count = 1
        return piece

    def _passed(self, text: str) -> Piece:
        self._text_bytes += len(text.encode("utf-8", "replace"))
        deltas = self._parsed(text)
        tokens: list[Shown] = []
        if deltas:
            tokens = [shown for shown, _ in self._pending]
            self._pending.clear()
        return Piece(deltas, tokens)

    def _end(self, text: str, reason: str, error: str = "") -> Piece:
        self.ended = True
        self._text_bytes += len(text.encode("utf-8", "replace"))
        deltas = self._parsed(text)
        if self._parser is not None:
            deltas += self._parser.flush()
        self.has_calls = self.has_calls or any(delta.call is not None for delta in deltas)
        cut = self._text_bytes if self._stream.finished else None
        tokens = [shown for shown, start in self._pending if cut is None or start < cut]
        if reason == "stop" and self.has_calls:
            reason = "tool_calls"
        return Piece(deltas, tokens, reason, error)

    def _parsed(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Delta(content=text)] if text else []
        deltas = self._parser.feed(text)
        self.has_calls = self.has_calls or any(delta.call is not None for delta in deltas)
        return deltas

    def _note(self, token: Token) -> None:
        assert token.logprob is not None
        found = token_bytes(self._tokenizer, token.id)
        top = tuple((token_bytes(self._tokenizer, number), _finite(score)) for number, score in token.top)
        shown = Shown(found, _finite(token.logprob), top, self._characters)
        self._pending.append((shown, self._bytes))
        self._bytes += len(found)
        self._characters += sum(1 for byte in found if byte & 0xC0 != 0x80)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
