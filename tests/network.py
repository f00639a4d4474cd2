"""Which machines a test may reach: this one, by its loopback addresses. conftest.py installs `forbid` for the whole run."""

from __future__ import annotations

from typing import Any


class NetworkError(RuntimeError):
    """A test reached for another machine."""


LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "", None}
ADDRESSED = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
reached: list[str] = []


def forbid(event: str, args: tuple[Any, ...]) -> None:
    if event in ADDRESSED:
        address = args[ADDRESSED[event]]
        host = address[0] if isinstance(address, tuple) else address
        host = host.decode() if isinstance(host, bytes) else host
        is_file = event in ("socket.connect", "socket.sendto") and not isinstance(address, tuple)  # a Unix socket's
        if host not in LOOPBACK and not is_file:
            reached.append(f"{event} {address}")
            raise NetworkError(f"a test reached for the network: {event} {address}")
