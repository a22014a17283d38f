"""The admin port: it listens from the start, and its server is made for the first connection.

FastAPI and uvicorn take 0.25 s and 13 MB, and most processes never serve it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.admin.server import AdminServer

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 1.0  # after a failed import


async def admin_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class AdminPort:
    """Listens on a socket that other processes may share; `make` returns the server."""

    def __init__(self, sock: socket.socket, make: Callable[[socket.socket], AdminServer]) -> None:
        self._socket, self._make = sock, make
        self._server: AdminServer | None = None
        self._wake = asyncio.Event()  # a client connects, or `stop` was called
        self._stopped = False

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopped:
            loop.add_reader(self._socket, self._wake.set)
            await self._wake.wait()
            if self._stopped:
                return
            loop.remove_reader(self._socket)
            self._wake.clear()
            try:
                # Streams go on while a thread imports the server's modules.
                server = await asyncio.to_thread(self._make, self._socket)
            except Exception as error:  # no open file, or modules were updated
                what = "the admin API cannot be loaded: %r; restart the router, or install it again"
                logger.error(what, error, exc_info=not isinstance(error, OSError))
                await self._refuse()
                continue
            if not self._stopped:
                self._server = server
                await server.run()
            return

    async def _refuse(self) -> None:
        with suppress(OSError):  # none left, or no open file
            self._socket.setblocking(False)
            while True:
                self._socket.accept()[0].close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), RETRY_INTERVAL_S)

    def stop(self) -> None:
        """End `run` soon, without waiting for responses in progress."""
        if self._stopped:
            return
        self._stopped = True
        if self._server is not None:
            self._server.stop()
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._wake.set()
        self._socket.close()
