"""Reports when ZeroMQ opens and loses a socket's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

EVENT_BYTES: Final = 2  # at the start of a monitor's first frame


class ConnectionMonitor:
    """Calls back from the event loop; a socket has one connection."""

    def __init__(
        self, socket: zmq.Socket[bytes], opened: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {
            zmq.EVENT_HANDSHAKE_SUCCEEDED: opened,
            zmq.EVENT_DISCONNECTED: ended,
        }
        self._monitored = socket
        self._loop = asyncio.get_running_loop()
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._socket: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._fd: int = self._socket.FD
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor shows only changes

    def close(self) -> None:
        """Stop; call before the socket itself is closed."""
        self._loop.remove_reader(self._fd)
        self._monitored.disable_monitor()
        self._socket.close(linger=0)

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                event, _ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._callbacks[int.from_bytes(event[:EVENT_BYTES], "little")]()
