"""The admin API on its own port, in the router's event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI


DATE_S = 1.0


async def admin_socket(host: str, port: int) -> socket.socket:
    """Listen where operators will find the admin API."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


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
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        config.load()
        config.ssl = tls  # uvicorn would make one of its own, and could not renew it
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._socket.getsockname()[1]
        return port

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


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Write the date anew each second, rather than look around ten times in it."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), DATE_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the router."""
        yield
