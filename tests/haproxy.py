"""A real HAProxy with the configuration of deploy/compose, in front of routers on this host."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.programs import fetched
from vllm_sched.workers.launch import free_port

DEADLINE_S = 60.0
CONFIG = Path(__file__).parents[1] / "deploy/compose/replicas/haproxy.cfg"


def configuration(port: int, routers: Sequence[int]) -> str:
    """Return the configuration with other addresses, more checks, and routers in turn."""
    text = CONFIG.read_text()
    for given, wanted in (
        ("bind :8000", f"bind 127.0.0.1:{port}"),
        ("bind 127.0.0.1:8001", f"bind 127.0.0.1:{free_port()}"),
        ("balance leastconn", "balance roundrobin\n    timeout check 2s"),
        (" inter 1s", " inter 200ms"),
        (" resolvers network init-addr libc,none", ""),
        ("maxconn 20000", "maxconn 500"),
    ):
        assert given in text, given
        text = text.replace(given, wanted)
    servers = "".join(f"    server r{port} 127.0.0.1:{port}\n" for port in routers)
    text, count = re.subn(r"(    server .*\n)+", servers, text)
    assert count == 1
    return text


class HAProxy:
    def __init__(self, folder: Path, routers: Sequence[int]) -> None:
        self.port = free_port()
        file, log = folder / "haproxy.cfg", folder / "haproxy.log"
        file.write_text(configuration(self.port, routers))
        with log.open("wb") as out:
            command = [fetched("haproxy"), "-f", str(file)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self.process.poll() is None, log.read_text()
                time.sleep(0.02)
            else:
                return
        raise TimeoutError("haproxy does not listen")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
