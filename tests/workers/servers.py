"""Fake servers for launch tests: a few lines of Python instead of vLLM."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

from vllm_sched.workers.launch import Worker, free_port

# Processes like vLLM's: a server that answers /health, and a child that would outlive it.
FAMILY = """
import http.server, os, pathlib, signal, subprocess, sys
port, pids, deaf = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
draft = pathlib.Path(pids + ".draft")
draft.write_text(f"{os.getpid()} {child.pid}")
draft.rename(pids)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def script(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def family(pids: Path, *, deaf: bool = False, grace_s: float = 5.0) -> Worker:
    """Return a worker with a child process; it writes its process ids to a file."""
    port = free_port()
    command = script(FAMILY, str(port), str(pids), "deaf" if deaf else "polite")
    return Worker(command, port=port, deadline_s=60.0, grace_s=grace_s)


def members(pids: Path) -> list[int]:
    """Return the process ids of the family, after it has written them."""
    eventually(pids.exists)
    return [int(pid) for pid in pids.read_text().split()]


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def eventually(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "condition is still false"
        time.sleep(0.02)


def assert_gone(pids: list[int]) -> None:
    eventually(lambda: not any(alive(pid) for pid in pids))
