"""Kernel state of connections."""

from __future__ import annotations

import asyncio
import socket
from array import array
from fcntl import ioctl
from termios import TIOCOUTQ


def socket_of(transport: asyncio.Transport) -> socket.socket | None:
    raw: socket.socket | None = transport.get_extra_info("socket")
    return raw if raw is not None and raw.fileno() >= 0 else None


def unacknowledged(transport: asyncio.Transport) -> int | None:
    """Return the bytes that the peer's kernel has not confirmed; None if unknown (not Linux).

    The count includes TLS framing.
    """
    raw, size = socket_of(transport), array("i", [0])
    if raw is None:
        return None
    try:
        ioctl(raw.fileno(), TIOCOUTQ, size)
    except OSError:
        return None
    return size[0] + transport.get_write_buffer_size()
