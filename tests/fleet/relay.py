"""A second address of a server, so that a router takes it for another one."""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

LOOPBACK = "127.0.0.1"


class Passing(socketserver.BaseRequestHandler):
    """One connection, and its like to the server."""

    server: Relay

    def handle(self) -> None:
        """Pass on what comes from either, until both have no more."""
        with socket.create_connection((LOOPBACK, self.server.to)) as there:
            back = Thread(target=pass_on, args=(there, self.request), daemon=True)
            back.start()
            pass_on(self.request, there)
            back.join()


class Relay(socketserver.ThreadingTCPServer):
    """Listens, and connects to another port for each connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, to: int) -> None:
        self.to = to
        super().__init__((LOOPBACK, 0), Passing)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that breaks."""


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Pass on all that comes, and its end."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def second_address(url: str) -> Iterator[str]:
    """Give the server at a URL another one."""
    with Relay(int(url.rsplit(":", 1)[1])) as relay:
        Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://{LOOPBACK}:{relay.server_address[1]}"
        finally:
            relay.shutdown()
