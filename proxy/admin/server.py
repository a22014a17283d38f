"""The admin API's server on its own port, in the router's event loop.

It shares the process's open files with the data path. So connections are bounded, and TLS
handshakes, requests and responses have timeouts. A new connection replaces the oldest one without a
complete request.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from proxy.admin.connection import TIMEOUT_S, AdminConnection

if TYPE_CHECKING:
    from fastapi import FastAPI

DATE_INTERVAL_S = 1.0
MAX_CONNECTIONS = 64
OPEN_FILES_SHARE = 8  # one of eight open files at most
MIN_CONNECTIONS = 4
MAX_HEAD_BYTES = 64 << 10
NO_FILES_PAUSE_S = 1.0  # pause of accepting without open files


def max_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(MAX_CONNECTIONS, files // OPEN_FILES_SHARE), MIN_CONNECTIONS)


class AdminServer:
    def __init__(
        self, app: FastAPI, sock: socket.socket, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = sock
        self._serves = False
        # h11 limits the size of a request head; httptools does not.
        config = uvicorn.Config(
            app,
            http=AdminConnection,
            log_config=None,
            log_level="warning",  # it would log a start of a process
            access_log=False,
            lifespan="off",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        config.ssl = tls  # uvicorn's own TLS context could not be renewed
        self._server = _Server(config)

    @property
    def connections(self) -> int:
        """Open connections, including TLS handshakes."""
        return len(self._server.listener.connections)

    async def run(self) -> None:
        self._serves = not self._server.should_exit
        if self._serves:
            await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """End `run` soon, without waiting for responses in progress."""
        self._server.should_exit = self._server.force_exit = True
        self._server.stopping.set()
        if not self._serves:
            self._socket.close()  # otherwise uvicorn still uses the socket and closes it


class AdminListener:
    """Accepts connections up to a limit; uvicorn closes it like its own servers."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Oldest first, with the task of the TLS handshake.
        self.connections: dict[AdminConnection, asyncio.Task[None]] = {}

    def start(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._listen()

    def close(self) -> None:
        """Stop accepting and cancel TLS handshakes."""
        sock, self._socket = self._socket, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
        if self._timer is not None:
            self._timer.cancel()
        for setup in list(self.connections.values()):
            setup.cancel()

    async def wait_closed(self) -> None:
        """Return at once."""

    def _listen(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # probably no open file is left
            loop.remove_reader(self._socket)
            self._timer = loop.call_later(NO_FILES_PAUSE_S, self._listen)
            return
        if len(self.connections) >= max_connections() and not self._replace_oldest():
            sock.close()
            return
        sock.setblocking(False)
        connection = AdminConnection(self._server.config, self._server.server_state, {}, loop)
        setup = loop.create_task(self._make(connection, sock))
        self.connections[connection] = setup
        connection.when_lost = self.connections.pop

    def _replace_oldest(self) -> bool:
        """Close the oldest connection without a complete request, if any."""
        oldest = next((connection for connection in self.connections if connection.waits), None)
        if oldest is not None:
            self.connections.pop(oldest).cancel()
            oldest.abort()
        return oldest is not None

    async def _make(self, connection: AdminConnection, sock: socket.socket) -> None:
        loop, tls = asyncio.get_running_loop(), self._server.config.ssl
        timeout_s = TIMEOUT_S if tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
        except (OSError, asyncio.CancelledError):  # the client left, timed out or was replaced
            sock.close()
            self.connections.pop(connection, None)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.listener = AdminListener(self)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or []:
            self.listener.start(sock)
        self.servers = [self.listener]  # type: ignore[list-item]  # only closed by uvicorn
        self.started = True

    async def main_loop(self) -> None:
        """Update the date each second; uvicorn polls ten times."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), DATE_INTERVAL_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to the router."""
        yield
