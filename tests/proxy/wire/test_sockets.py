"""Kernel state of connections."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from proxy.wire.sockets import socket_of


class Socket(socket.socket):
    """A socket with another descriptor."""

    number = 0

    def fileno(self) -> int:
        return self.number


@pytest.mark.parametrize(("number", "is_open"), [(-1, False), (0, True), (7, True)])
def test_socket_of_a_transport_is_none_once_it_is_closed(number: int, is_open: bool) -> None:
    """A process that starts without standard input uses descriptor 0 for a connection."""

    class Transport:
        def get_extra_info(self, _name: str) -> socket.socket:
            return raw

    with Socket() as raw:
        raw.number = number
        transport: Any = Transport()
        assert socket_of(transport) is (raw if is_open else None)
