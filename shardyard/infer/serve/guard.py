"""What every request passes: the key, a fault's shape, the count of requests, and the log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.forms import dumps
from shardyard.infer.serve.metrics import Metrics
from shardyard.infer.serve.sending import GONE

logger = logging.getLogger("shardyard.serve")
access = logging.getLogger("shardyard.serve.access")

_OPEN = "/health"
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
_LONGEST_LINE = 200


class Guard:
    """Stands around the application. ``api_key``: who does not bring it gets 401, but for the health."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, api_key: str | None = None, access_log: bool = False
    ) -> None:
        self._app, self._metrics, self._access_log = app, metrics, access_log
        self._key = None if api_key is None else _digest(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        began = time.perf_counter()
        scope["shardyard.arrived"] = began
        try:
            if self._key is not None and scope["path"] != _OPEN and not self._has_key(scope):
                fault = ApiFault(
                    401, "A valid API key is wanted: Authorization: Bearer KEY.", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                await send_fault(fault, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            logger.exception("request %s failed", answer.id)
            if answer.status is not None:
                raise  # the connection is closed, as the answer has no end
            await send_fault(ApiFault(500, "The server has failed.", code="internal_error"), answer)
        finally:
            self._note(scope, answer, time.perf_counter() - began)

    def _has_key(self, scope: Scope) -> bool:
        assert self._key is not None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        return hmac.compare_digest(_digest(key.strip()), self._key) and kind.lower() == b"bearer"

    def _note(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = GONE if scope.get("shardyard.gone") else answer.status or GONE
        self._metrics.requests[method, route, status] += 1
        if self._access_log:
            path = ascii(scope["path"])[1:-1][:_LONGEST_LINE]
            client = (scope.get("client") or ("-",))[0]
            access.info(
                "%s %s %s %s %d %.3fs %s", time.strftime("%Y-%m-%dT%H:%M:%S"), client, method, path, status,
                seconds, answer.id,
            )  # fmt: skip


class _Answer:
    """``send`` that remembers the status, and gives each answer an id that the log has too."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.id = uuid.uuid4().hex
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.id.encode())]
        await self._send(message)


async def send_fault(fault: ApiFault, send: Send) -> None:
    """A fault as the whole answer."""
    body = dumps(fault.body())
    headers: Mapping[str, Any] = {
        "content-type": "application/json", "content-length": str(len(body)), **fault.headers,
    }  # fmt: skip
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    """Of one length for all keys, so that the comparison's time tells nothing of the length either."""
    return hashlib.sha256(key).digest()
