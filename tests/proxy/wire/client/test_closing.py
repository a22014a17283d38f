"""The kernel's view of connections: closed sockets, and last bytes that are not delivered."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from proxy.wire.client.closing import Closing
from proxy.wire.sockets import socket_of


class Socket(socket.socket):
    """A socket with another descriptor."""

    number: int

    def fileno(self) -> int:
        return self.number


class Transport:
    """A transport with a socket that has sent nothing."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw, self.unsent = raw, 0

    def get_extra_info(self, _name: str) -> socket.socket:
        return self.raw

    def get_write_buffer_size(self) -> int:
        return self.unsent


@pytest.mark.parametrize(("number", "is_open"), [(-1, False), (0, True), (7, True)])
def test_socket_of_a_transport_is_none_once_it_is_closed(number: int, is_open: bool) -> None:
    """A process that starts without standard input uses descriptor 0 for a connection."""
    with Socket() as raw:
        raw.number = number
        transport: Any = Transport(raw)
        assert socket_of(transport) is (raw if is_open else None)


def test_delivery_ends_after_two_checks_without_unsent_bytes() -> None:
    with socket.socket() as raw:
        transport: Any = Transport(raw)
        closing = Closing()
        closing.begin(10.0)
        found = []
        for transport.unsent in (0, 0, 9, 0, 0):
            found.append(closing.has_undelivered(1.0, transport))
        assert found == [True, False, True, True, False]
        transport.unsent = 9
        assert not closing.has_undelivered(10.0, transport)
