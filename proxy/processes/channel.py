"""A line between the supervisor and one of its processes, over a pair of sockets nobody else has.

That it is lost tells each of the other's end, whatever that was.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Callable
from struct import Struct
from typing import cast

from proxy.processes.ipc_messages import Message

logger = logging.getLogger(__name__)

LENGTH = Struct("!I")


class Channel(asyncio.Protocol):
    """One end."""

    def __init__(self, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    @classmethod
    async def open(
        cls, sock: socket.socket, heard: Callable[[Message], None], lost: Callable[[], None]
    ) -> Channel:
        """Begin to listen on a socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(heard, lost), sock=sock)
        return channel

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return self._transport.get_write_buffer_size()

    def say(self, message: Message) -> None:
        """Send a message; to an end that is lost, nothing."""
        if not self._transport.is_closing():
            data = pickle.dumps(message)
            self._transport.write(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Hang up once everything is sent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the line."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take whole messages."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
            if len(buffer) < end:
                return
            message = pickle.loads(buffer[LENGTH.size : end])  # noqa: S301  # from our own process
            del buffer[:end]
            self.take(message)

    def take(self, message: Message) -> None:
        """Hear one; what can't be done with it must not end the line, nor whoever hears it."""
        try:
            self._heard(message)
        except Exception:
            logger.exception("a message of another process: %s", type(message).__name__)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Say so."""
        self._lost()
