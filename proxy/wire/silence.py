"""Machines that are gone and can't say so: power, a cable, a router that forgot the connection."""

from __future__ import annotations

import asyncio
import socket

Option = tuple[int, str, int]  # level, name, value

# The other's kernel answers such probes however busy its process is: half a minute of silence.
PROBES: tuple[Option, ...] = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)


def notice_silence(transport: asyncio.BaseTransport, *besides: Option) -> None:
    """Have the kernel end a connection whose other machine is gone."""
    if transport.is_closing():  # nobody waits for it any more
        return
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for level, name, value in (*PROBES, *besides):
        if hasattr(socket, name):  # not everywhere
            raw.setsockopt(level, getattr(socket, name), value)
