"""A real Redis server for a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.programs import fetched

DEADLINE_S = 60.0


class RedisServer:
    """A server on a free port of the loopback interface, without persistence."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self._command = [
            fetched("redis"), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
            "--dir", str(folder), "--daemonize", "no", *options,
        ]  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.02)
            else:
                return
        raise TimeoutError("the server does not listen")

    def kill(self) -> None:
        """End the server as in a crash; everything is lost."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()  # also a frozen process
        self.process.wait()
