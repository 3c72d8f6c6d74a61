"""Which network interface the ranks of several machines talk through."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
_NAME_BYTES, _ADDRESS_AT = 256, slice(20, 24)


def choose_gloo_interface() -> str:
    """Set GLOO_SOCKET_IFNAME to the interface towards MASTER_ADDR and return its name; "" if left alone.

    By itself gloo takes the address that this machine's name stands for, which many installations map to a
    loopback address that no other machine reaches. A choice of the user's is kept.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    address = _own_address_towards(os.environ.get("MASTER_ADDR", ""))
    if not address or address.startswith("127."):
        return ""
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return name
    return ""


def _own_address_towards(host: str) -> str:
    """The IPv4 address from which a packet to ``host`` would leave; "" without a way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack(f"{_NAME_BYTES}s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # an interface without such an address
            return ""
    return socket.inet_ntoa(answer[_ADDRESS_AT])
