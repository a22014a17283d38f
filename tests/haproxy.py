"""A real HAProxy in front of routers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.programs import fetched
from vllm_sched.workers.launch import free_port

DEADLINE_S = 10.0
CONFIG = """\
defaults
  mode http
  timeout connect 1s
  timeout check 2s
  timeout client 60s
  timeout server 60s
  retries 3
  option redispatch 1
  retry-on conn-failure
  http-error status 502 content-type application/json string '{error}'
  http-error status 503 content-type application/json string '{error}'
  http-error status 504 content-type application/json string '{error}'
frontend clients
  bind 127.0.0.1:{port}
  default_backend routers
backend routers
  balance roundrobin
  option httpchk GET /ready
  default-server check inter 200ms fall 2 rise 1
"""
ERROR = '{"error":{"message":"no router","type":"server_error","param":null,"code":null}}'


class HAProxy:
    """Spreads requests over routers that are ready; only a failed connection is tried again."""

    def __init__(self, folder: Path, routers: Sequence[int]) -> None:
        self.port = free_port()
        servers = (f"  server r{at} 127.0.0.1:{port}\n" for at, port in enumerate(routers))
        config = folder / "haproxy.cfg"
        config.write_text(CONFIG.format(port=self.port, error=ERROR) + "".join(servers))
        command = [fetched("haproxy"), "-q", "-db", "-f", str(config)]
        with (folder / "haproxy.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert self.process.poll() is None, (folder / "haproxy.log").read_text()
                time.sleep(0.02)
            else:
                return
        raise TimeoutError("haproxy does not listen")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
