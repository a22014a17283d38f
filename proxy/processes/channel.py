"""A message channel between the supervisor and one process, over a private socket pair.

A lost connection tells each end that the other has exited.
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
    def __init__(self, handle: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self._handle = handle
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    @classmethod
    async def open(
        cls, sock: socket.socket, handle: Callable[[Message], None], lost: Callable[[], None]
    ) -> Channel:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(handle, lost), sock=sock)
        return channel

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not read."""
        return self._transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the connection is lost."""
        if not self._transport.is_closing():
            data = pickle.dumps(message)
            self._transport.write(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the connection after everything is sent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
            if len(buffer) < end:
                return
            # Sent by the router's own process.
            message = pickle.loads(buffer[LENGTH.size : end])  # noqa: S301
            del buffer[:end]
            self.handle(message)

    def handle(self, message: Message) -> None:
        """Handle a message; an error in its handler must not close the channel."""
        try:
            self._handle(message)
        except Exception:
            logger.exception(
                "handling a message of another process failed: %s", type(message).__name__
            )

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._lost()
