"""Failing name lookups in a router that runs in another process.

Python reads `sitecustomize.py` from the folder in the router and in its child processes.
"""

from __future__ import annotations

import os
from pathlib import Path

CODE = """\
import socket
from pathlib import Path

from proxy.discovery.dns import DnsSource

look_up = DnsSource._look_up


async def failing_look_up(self):
    if Path({flag!r}).exists():
        raise socket.gaierror(socket.EAI_AGAIN, "no answer from any server")
    return await look_up(self)


DnsSource._look_up = failing_look_up
"""
LOOKUP_FAILED_LINE = "can't be looked up"  # logged once when lookups begin to fail


def failing_lookups(folder: Path, more: str = "") -> tuple[dict[str, str], Path]:
    """Return an environment for the router, and a file; while it exists, lookups fail.

    `more` is further code that its processes run at their start.
    """
    flag, code = folder / "no-names", folder / "names"
    code.mkdir()
    (code / "sitecustomize.py").write_text(CODE.format(flag=str(flag)) + more)
    path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}, flag
