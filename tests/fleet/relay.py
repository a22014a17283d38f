"""A second address of a server, which a router takes for another server."""

from __future__ import annotations

import signal
import socket
import socketserver
import struct
import sys
import time
from collections.abc import Callable, Iterator
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
            self.server.open += [self.request, there]
            back = Thread(target=self.pass_back, args=(there,), daemon=True)
            back.start()
            pass_on(self.request, there)
            back.join()

    def pass_back(self, there: socket.socket) -> None:
        pass_on(there, self.request, self.server.note_data)


class Relay(socketserver.ThreadingTCPServer):
    """A TCP relay to another port."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, to: int, port: int = 0) -> None:
        self.to = to
        self.open: list[socket.socket] = []
        self.data_at = 0.0  # time of the server's last data
        super().__init__((LOOPBACK, port), RelayHandler)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}"

    def note_data(self) -> None:
        self.data_at = time.monotonic()

    def cut(self) -> None:
        """Reset all connections, as a machine that fails does; new ones are possible."""
        sockets, self.open = self.open, []
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""


def pass_on(
    source: socket.socket, sink: socket.socket, note: Callable[[], None] = lambda: None
) -> None:
    """Copy all data and the end of the stream."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
            note()
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def relaying(url: str) -> Iterator[Relay]:
    with Relay(int(url.rsplit(":", 1)[1])) as relay:
        Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield relay
        finally:
            relay.shutdown()


def main() -> None:
    """Relay each `PORT:TO` of the command line until the process is killed."""
    for pair in sys.argv[1:]:
        port, to = map(int, pair.split(":"))
        Thread(target=Relay(to, port).serve_forever, daemon=True).start()
    signal.pause()


if __name__ == "__main__":
    main()
