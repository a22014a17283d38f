"""Names that can't be looked up for a while, in a router that is a process of its own.

Its Python reads `sitecustomize.py` from the folder, and so do the processes that it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

CODE = """\
import socket
from pathlib import Path

from proxy.discovery.dns import DnsSource

look_up = DnsSource._look_up


async def at_times(self):
    if Path({flag!r}).exists():
        raise socket.gaierror(socket.EAI_AGAIN, "no answer from any server")
    return await look_up(self)


DnsSource._look_up = at_times
"""
SEEN = "can't be looked up"  # in the router's log, once for each time that it begins


def failing(folder: Path, more: str = "") -> tuple[dict[str, str], Path]:
    """Return an environment for the router, and the file while which is there no name is found.

    `more`: what else its processes are to run at first.
    """
    flag, code = folder / "no-names", folder / "names"
    code.mkdir()
    (code / "sitecustomize.py").write_text(CODE.format(flag=str(flag)) + more)
    path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}, flag
