"""Answers in the forms of the two APIs: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from shardyard.infer.openai_messages import call_to_openai
from shardyard.infer.replies import Delta
from shardyard.infer.serve.growing import Piece, Shown
from shardyard.infer.serve.subject import Ask

Json = dict[str, Any]


def dumps(value: Any) -> bytes:
    """JSON as it is sent; half a surrogate pair, which a model may spell in JSON, becomes ``?``."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


class Form(Protocol):
    """How one API writes answers."""

    name: str
    """``object`` of a whole answer."""
    chunk_name: str
    prefix: str
    """Of ids."""

    def choice(self, number: int, piece: Piece) -> Json:
        """A whole answer."""
        ...

    def first(self, number: int) -> Json | None:
        """What a stream says of an answer before its first piece."""
        ...

    def chunks(self, number: int, piece: Piece) -> Iterator[Json]:
        """What a stream says of a piece."""
        ...


class ChatForm:
    """``shows_logprobs``: the request asked for them."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, shows_logprobs: bool) -> None:
        self._shows_logprobs = shows_logprobs
        self._calls: dict[int, int] = {}
        """Calls so far of each answer."""

    def choice(self, number: int, piece: Piece) -> Json:
        reasoning = "".join(delta.reasoning for delta in piece.deltas)
        calls = [call_to_openai(delta.call, _call_id()) for delta in piece.deltas if delta.call is not None]
        message: Json = {"role": "assistant", "content": piece.text or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": number, "message": message, "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.reason,
        }  # fmt: skip

    def first(self, number: int) -> Json | None:
        return self._chunk(number, {"role": "assistant", "content": ""})

    def chunks(self, number: int, piece: Piece) -> Iterator[Json]:
        tokens: Sequence[Shown] = piece.tokens
        for delta in _merged(piece.deltas):
            yield self._chunk(number, self._delta(number, delta), tokens)
            tokens = ()
        if piece.reason is not None:
            yield self._chunk(number, {}, tokens, piece.reason)

    def _delta(self, number: int, delta: Delta) -> Json:
        if delta.call is not None:
            place = self._calls.get(number, 0)
            self._calls[number] = place + 1
            return {"tool_calls": [{"index": place, **call_to_openai(delta.call, _call_id())}]}
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}

    def _chunk(
        self, number: int, delta: Json, tokens: Sequence[Shown] = (), reason: str | None = None
    ) -> Json:
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
        if not self._shows_logprobs:
            return None
        return {
            "content": [
                _token(token.bytes, token.logprob) | {"top_logprobs": [_token(*one) for one in token.top]}
                for token in tokens
            ]
        }


class TextForm:
    """Of ``/v1/completions``. ``asks`` hold what is echoed."""

    name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def __init__(self, asks: Sequence[Ask], logprobs: int | None) -> None:
        self._asks, self._count = asks, logprobs

    def choice(self, number: int, piece: Piece) -> Json:
        return self._choice(number, self._asks[number].echo + piece.text, piece.tokens, piece.reason)

    def first(self, number: int) -> Json | None:
        echo = self._asks[number].echo
        return self._choice(number, echo) if echo else None

    def chunks(self, number: int, piece: Piece) -> Iterator[Json]:
        if piece.text or piece.tokens or piece.reason is not None:
            yield self._choice(number, piece.text, piece.tokens, piece.reason)

    def _choice(
        self, number: int, text: str, tokens: Sequence[Shown] = (), reason: str | None = None
    ) -> Json:
        return {
            "index": number, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": reason,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
        if self._count is None:
            return None
        return {
            "tokens": [_word(token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens] if self._count else None,
            "text_offset": [token.offset for token in tokens],
        }


class Envelope:
    """What stands around all answers of one request."""

    def __init__(self, form: Form, model: str, asks: Sequence[Ask], prompts: int) -> None:
        self._form, self._prompts = form, asks[:: len(asks) // prompts]
        self._numbers = range(len(asks))
        self._head = {"id": form.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._new_tokens = 0

    def count(self, piece: Piece) -> None:
        self._new_tokens += piece.count

    def whole(self, answers: dict[int, Piece]) -> Json:
        """The answer to a request that does not stream."""
        choices = [self._form.choice(number, answers[number]) for number in self._numbers]
        return {**self._head, "object": self._form.name, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[Json], usage: Json | bool | None = False) -> Json:
        """One of a stream; ``usage`` False leaves it out."""
        told = {**self._head, "object": self._form.chunk_name, "choices": choices}
        return told if usage is False else told | {"usage": usage}

    def usage(self) -> Json:
        prompt = sum(len(ask.request.prompt_ids) for ask in self._prompts)
        return {
            "prompt_tokens": prompt, "completion_tokens": self._new_tokens,
            "total_tokens": prompt + self._new_tokens,
        }  # fmt: skip

    def opening(self) -> Iterator[Json]:
        for number in self._numbers:
            if (first := self._form.first(number)) is not None:
                yield first

    def chunks(self, number: int, piece: Piece) -> Iterator[Json]:
        return self._form.chunks(number, piece)


def _merged(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """Neighbours of one kind as one."""
    held: Delta | None = None
    for delta in deltas:
        if held is not None and held.call is None and delta.call is None and _kind(held) == _kind(delta):
            held = Delta(held.reasoning + delta.reasoning, held.content + delta.content)
            continue
        if held is not None:
            yield held
        held = delta
    if held is not None:
        yield held


def _kind(delta: Delta) -> bool:
    return bool(delta.reasoning)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _token(found: bytes, logprob: float) -> Json:
    return {"token": found.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(found)}


def _word(found: bytes) -> str:
    """A token's text; bytes that are no text in the way of OpenAI's completions."""
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _likeliest(token: Shown) -> dict[str, float]:
    told: dict[str, float] = {}
    for found, logprob in token.top:
        told.setdefault(_word(found), logprob)
    return told
