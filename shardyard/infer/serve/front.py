"""What the service shows to the network. Nothing here needs torch, nor a web framework."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from shardyard.errors import UserError


@dataclass(frozen=True)
class Front:
    """Address, key and what else its clients meet."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    access_log: bool = False
    grace: float = 30.0
    """Seconds that running requests get to end, once the service is told to stop."""


def bind(front: Front) -> socket.socket:
    """The socket of the service; nothing is taken from it yet.

    Raises:
        UserError: the host has no such address, or the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            front.host, front.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UserError(f"--host {front.host}: {error.strerror or error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--port {front.port} on {front.host}: {error.strerror or error}; name another (0: a free one)"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
