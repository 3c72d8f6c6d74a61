"""Answers on their way to the client, who may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.forms import Envelope, Json, dumps
from shardyard.infer.serve.growing import Piece
from shardyard.infer.serve.running import Running

GONE = 499
"""The status, in metrics and log, of an answer that nobody waited for."""
_LAST_WORD_S = 1.0
_DONE = b"data: [DONE]\n\n"


async def whole(running: Running, envelope: Envelope) -> Json:
    """All of the answers, once they have ended."""
    answers: dict[int, Piece] = {}
    async with aclosing(running.pieces()) as batches:
        async for batch in batches:
            for number, piece in batch:
                envelope.count(piece)
                answers.setdefault(number, Piece()).add(piece)
    return envelope.whole(answers)


async def events(running: Running, envelope: Envelope, *, usage: bool) -> AsyncGenerator[bytes, None]:
    """The stream of the answers; a fault is its last event, without ``[DONE]``."""
    field = None if usage else False
    try:
        for choice in envelope.opening():
            yield _event(envelope.chunk([choice], field))
        async with aclosing(running.pieces()) as batches:
            async for batch in batches:
                parts = []
                for number, piece in batch:
                    envelope.count(piece)
                    parts += [_event(envelope.chunk([one], field)) for one in envelope.chunks(number, piece)]
                if parts:
                    yield b"".join(parts)
    except ApiFault as fault:
        yield _event(fault.body())
        return
    if usage:
        yield _event(envelope.chunk([], envelope.usage()))
    yield _DONE


def _event(value: Json) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Json]) -> Json | None:
    """What ``work`` gives, or None: the client has left, and ``work`` is cancelled.

    The request's body has been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await _stopped(task, gone)


class EventStream(Response):
    """Server-sent events. ``held`` is closed at the end, whatever it is: sent, cut off by the client, or by
    ``deadline``, in the loop's time, also where the client does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], held: AsyncExitStack, deadline: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source, self._held, self._deadline = source, held, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            sending = asyncio.ensure_future(self._send(send))
            gone = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    await sending
                else:
                    scope["shardyard.gone"] = True
            finally:
                await _stopped(sending, gone)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._source) as source:
                async for data in source:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            try:
                async with asyncio.timeout(_LAST_WORD_S):
                    body = _event(timed_out().body())
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:  # the client does not read: the server closes an answer without an end
                return
        await send({"type": "http.response.body", "body": b""})


def timed_out() -> ApiFault:
    """The fault of an answer that took longer than the server gives."""
    return ApiFault(504, "The answer took longer than this server allows.", code="timeout")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
