"""A second address of a server, which a router takes for another server."""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

LOOPBACK = "127.0.0.1"


class RelayHandler(socketserver.BaseRequestHandler):
    """A client connection and its connection to the server."""

    server: Relay

    def handle(self) -> None:
        """Relay both directions until both have ended."""
        with socket.create_connection((LOOPBACK, self.server.to)) as there:
            back = Thread(target=pass_on, args=(there, self.request), daemon=True)
            back.start()
            pass_on(self.request, there)
            back.join()


class Relay(socketserver.ThreadingTCPServer):
    """A TCP relay to another port."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, to: int) -> None:
        self.to = to
        super().__init__((LOOPBACK, 0), RelayHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Copy all data and the end of the stream."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def second_address(url: str) -> Iterator[str]:
    """Return a second URL of a server."""
    with Relay(int(url.rsplit(":", 1)[1])) as relay:
        Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://{LOOPBACK}:{relay.server_address[1]}"
        finally:
            relay.shutdown()
