"""The process of the service: its socket, its signals, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardyard.infer.serve.application import build_app
from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.forms import dumps
from shardyard.infer.serve.front import Front, is_loopback
from shardyard.infer.serve.service import Service

logger = logging.getLogger("shardyard.serve")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 2.0
"""How long the health says 503 after the engine's end, before the process ends too."""
_REQUEST_LINE_S = 30.0
"""How long a new connection may take to send its first bytes."""


def run(
    service: Service,
    front: Front,
    listener: socket.socket,
    started: Callable[[uvicorn.Server], object] = lambda server: None,
) -> int:
    """Serve until a signal, then 0; or until the engine is at fault, then 1.

    ``started`` gets the server before it runs: without the main thread there are no signals.
    """
    app = build_app(
        service, api_key=front.api_key, allow_origins=front.allow_origins, access_log=front.access_log
    )
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=front.grace,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving %s at http://%s:%d/v1 (Ctrl-C stops)", service.subject.name, shown, port)
    if front.api_key is None and not is_loopback(front.host):
        logger.warning(
            "anyone who reaches %s can use this service: no key is set (--api-key or SHARDYARD_API_KEY)",
            shown,
        )
    server = _Server(config, service)
    started(server)
    server.run(sockets=[listener])
    if (fault := service.engine.fault) is not None:
        logger.error("the service has ended: %s", fault)
        return 1
    return 0


class _Server(uvicorn.Server):
    """Ends with an exit code of ours, and takes no new requests before it does."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._ends_at: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at the end, which would kill a process that has ended well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.closing = True
        self.force_exit = self.should_exit  # asked a second time
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        if self._ends_at is None and self._service.engine.fault is not None:
            self._ends_at = now + _LAST_WORDS_S
        if self._ends_at is not None and now >= self._ends_at:
            self.should_exit = True
        return await super().on_tick(counter)


class _Protocol(H11Protocol):
    """Answers what is no HTTP in the API's shape, and does not wait forever for a first byte."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(_REQUEST_LINE_S, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        body = dumps(ApiFault(400, "This is no HTTP request that can be read.").body())
        headers = [
            ("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close"),
        ]  # fmt: skip
        for event in (
            h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()
        ):  # fmt: skip
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
