"""The admin API on its own port, in the router's event loop.

It shares the process's open files with the data path. So its connections have a bound, and a
deadline for each thing that a client may be slow at: a TLS handshake, a request, taking an answer.
The oldest connection without a whole request gives way to a new one.
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

from proxy.admin.connection import PATIENCE_S, AdminConnection

if TYPE_CHECKING:
    from fastapi import FastAPI

DATE_S = 1.0
MAX_CONNECTIONS = 64
OPEN_FILES_SHARE = 8  # at most one of eight open files is an admin connection
MIN_CONNECTIONS = 4  # whatever the limit on open files
MAX_HEAD_BYTES = 64 << 10
NO_FILES_PAUSE_S = 1.0  # before a connection is accepted again, after there was no open file for it


async def admin_socket(host: str, port: int) -> socket.socket:
    """Listen where operators will find the admin API."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def max_connections() -> int:
    """Return how many connections the admin port may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(MAX_CONNECTIONS, files // OPEN_FILES_SHARE), MIN_CONNECTIONS)


class AdminServer:
    """Listens from the start, so that a port in use is an error of the start."""

    def __init__(
        self,
        app: FastAPI,
        sock: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = sock
        self._serves = False
        # h11 bounds a head; httptools would collect one without end.
        config = uvicorn.Config(
            app,
            http=AdminConnection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        config.ssl = tls  # uvicorn would make one of its own, and could not renew it
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """How many connections are open, TLS handshakes included."""
        return len(self._server.listener.connections)

    async def run(self) -> None:
        """Serve until `stop`."""
        self._serves = not self._server.should_exit
        if self._serves:
            await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """End `run` soon; answers under way are not waited for."""
        self._server.should_exit = self._server.force_exit = True
        self._server.stopping.set()
        if not self._serves:
            self._socket.close()  # else it is the server's, which has yet to forget it


class AdminListener:
    """Accepts connections up to a bound; uvicorn's server closes it as one of its own."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        # By age, with the task that makes each, which takes long where there is a TLS handshake.
        self.connections: dict[AdminConnection, asyncio.Task[None]] = {}

    def start(self, sock: socket.socket) -> None:
        """Accept connections on a socket that listens."""
        sock.setblocking(False)
        self._socket = sock
        self._listen()

    def close(self) -> None:
        """Accept no more, and give up the TLS handshakes."""
        sock, self._socket = self._socket, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
        if self._timer is not None:
            self._timer.cancel()
        for making in list(self.connections.values()):
            making.cancel()

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
        except OSError:  # most likely no open file is left
            loop.remove_reader(self._socket)
            self._timer = loop.call_later(NO_FILES_PAUSE_S, self._listen)
            return
        if len(self.connections) >= max_connections() and not self._give_way():
            sock.close()
            return
        sock.setblocking(False)
        connection = AdminConnection(self._server.config, self._server.server_state, {}, loop)
        making = loop.create_task(self._make(connection, sock))
        self.connections[connection] = making
        connection.when_lost = self.connections.pop

    def _give_way(self) -> bool:
        """Close the oldest connection without a whole request, if there is one."""
        oldest = next((each for each in self.connections if each.waits), None)
        if oldest is not None:
            self.connections.pop(oldest).cancel()
            oldest.abort()
        return oldest is not None

    async def _make(self, connection: AdminConnection, sock: socket.socket) -> None:
        loop, tls = asyncio.get_running_loop(), self._server.config.ssl
        patience_s = PATIENCE_S if tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=patience_s,
                ssl_shutdown_timeout=patience_s,
            )
        except (OSError, asyncio.CancelledError):  # it left, was late, or gave way
            sock.close()
            self.connections.pop(connection, None)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.listener = AdminListener(self)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with bounds."""
        for sock in sockets or []:
            self.listener.start(sock)
        self.servers = [self.listener]  # type: ignore[list-item]  # closed as such, no more
        self.started = True

    async def main_loop(self) -> None:
        """Write the date anew each second, rather than look around ten times in it."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), DATE_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the router."""
        yield
