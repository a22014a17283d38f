"""The ports of a router of several processes, held by the supervisor."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

from proxy.admin.port import admin_socket
from proxy.config.fleet_file import RouterConfig
from proxy.processes.ipc_messages import Address


class Ports:
    """The client port, reserved for the processes, and the admin port's shared socket."""

    def __init__(self) -> None:
        self.port = 0
        self.admin: socket.socket
        self._shared: list[socket.socket] = []
        self._kept = ExitStack()

    @property
    def admin_port(self) -> int:
        port: int = self.admin.getsockname()[1]
        return port

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple((sock.family, sock.getsockname()) for sock in self._shared)

    async def reserve(self, router: RouterConfig) -> None:
        try:
            await self._reserve_ports(router)
        except OSError:
            self.close()
            raise

    async def _reserve_ports(self, router: RouterConfig) -> None:
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(router.host, router.port, type=socket.SOCK_STREAM)
        self.port = router.port
        for family, _, _, _, address in dict.fromkeys(addresses):
            # SO_REUSEPORT alone would let a second router share the port, so first bind without it.
            with bind(family, (address[0], self.port, *address[2:]), shared=False) as alone:
                self.port = alone.getsockname()[1]
            shared = bind(family, (address[0], self.port, *address[2:]))
            self._shared.append(self._kept.enter_context(shared))
        listening = await admin_socket(router.admin.host, router.admin.port)
        self.admin = self._kept.enter_context(listening)

    def close(self) -> None:
        self._shared.clear()
        self._kept.close()


def bind(family: int, address: Any, *, shared: bool = True) -> socket.socket:
    """Return a socket with an address, which other processes may share."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setblocking(False)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror}: {address[0]} port {address[1]}") from None
    return bound
