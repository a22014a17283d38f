"""TCP keepalive, to detect machines that disappear."""

from __future__ import annotations

import asyncio
import socket

Option = tuple[int, int, int]  # level, name, value


def _supported(*options: tuple[int, str, int]) -> tuple[Option, ...]:
    constants = [(level, getattr(socket, name, None), value) for level, name, value in options]
    return tuple((level, name, value) for level, name, value in constants if name is not None)


# Three probes after 15 s idle; the kernel of a busy process responds.
PROBES = _supported(
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
# Sent data must be confirmed within 60 s.
PROBES_AND_TIMEOUT = (*PROBES, *_supported((socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 60_000)))


def enable_keepalive(
    transport: asyncio.BaseTransport, options: tuple[Option, ...] = PROBES
) -> None:
    """Let the kernel end the connection if the peer's machine disappears."""
    if transport.is_closing():
        return
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for option in options:
        raw.setsockopt(*option)
