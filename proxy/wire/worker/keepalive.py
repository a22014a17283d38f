"""Machines that are gone and can't say so: power, a cable, a router that forgot the connection."""

from __future__ import annotations

import asyncio
import socket

Option = tuple[int, int, int]  # level, name, value


def _known(*options: tuple[int, str, int]) -> tuple[Option, ...]:
    """Leave out what this system has not."""
    found = [(level, getattr(socket, name, None), value) for level, name, value in options]
    return tuple((level, name, value) for level, name, value in found if name is not None)


# Idle for 15 s it is asked three times: its kernel answers however busy its process is.
PROBES = _known(
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
# And what it is sent it has to confirm.
CONFIRMS = (*PROBES, *_known((socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 60_000)))


def notice_silence(transport: asyncio.BaseTransport, options: tuple[Option, ...] = PROBES) -> None:
    """Have the kernel end a connection whose other machine is gone."""
    if transport.is_closing():  # nobody waits for it any more
        return
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for option in options:
        raw.setsockopt(*option)
