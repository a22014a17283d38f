"""How long a closing connection may deliver its last bytes."""

from __future__ import annotations

import socket
from typing import Any

from proxy.wire.client.closing import Closing


class Transport:
    """A transport with a socket that has sent nothing."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw, self.unsent = raw, 0

    def get_extra_info(self, _name: str) -> socket.socket:
        return self.raw

    def get_write_buffer_size(self) -> int:
        return self.unsent


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
