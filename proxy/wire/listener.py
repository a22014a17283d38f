"""The sockets on which clients connect.

Without free files uvloop accepts connections and closes them. So accepting stops before that, and
clients wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from math import inf
from typing import Any

BACKLOG = 4096
SPARE_SHARE = 8  # one of eight open files


class Listener:
    """Accepts clients; `pause` keeps the sockets."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        self.is_paused = False
        self.max_files = inf  # of clients and workers
        self._protocol = protocol
        self._tls: dict[str, Any] = {}
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._opening: asyncio.Task[None] | None = None

    async def open(self, where: dict[str, Any], tls: dict[str, Any]) -> int:
        """Listen at an address or on a socket; return the port."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            self.max_files = float(files - files // SPARE_SHARE)
        self._tls = tls
        server: Any = await self._serve(where)  # uvloop's has a list of sockets, not a tuple
        for listening_socket in server.sockets:
            self._sockets.append(socket.socket(fileno=os.dup(listening_socket.fileno())))
        return int(server.sockets[0].getsockname()[1])

    async def _serve(self, where: dict[str, Any]) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, backlog=BACKLOG, **where, **self._tls)
        self._servers.append(server)
        return server

    def pause(self) -> None:
        self.is_paused = True
        self._stop_accepting()

    def resume(self) -> None:
        """Accept again; without free files the pause goes on."""
        if self._opening is None and self._sockets:
            self._opening = asyncio.get_running_loop().create_task(self._accept_again())

    def lowest_free_file(self) -> float:
        try:
            file = os.dup(self._sockets[0].fileno())
        except (OSError, IndexError):  # none is free, or closed
            return inf
        os.close(file)
        return float(file)

    async def _accept_again(self) -> None:
        self.is_paused = False
        try:
            for sock in list(self._sockets):
                await self._serve({"sock": sock.dup()})
        except OSError:
            self.is_paused = True
        self._opening = None
        if self.is_paused or not self._sockets:  # paused again or closed since
            self._stop_accepting()

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def close(self) -> None:
        self._stop_accepting()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
