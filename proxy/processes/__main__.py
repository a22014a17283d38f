"""One process of a router, as its supervisor starts it: `python -m proxy.processes INDEX FD FD FD`.

The file descriptors are the shared table's, the supervisor channel's and the admin port's.
"""

from __future__ import annotations

import logging
import socket
import sys

import uvloop

from proxy.processes.server_process import serve
from proxy.setup.memory import keep_freed_memory


def main() -> int:
    index, table, *sockets = map(int, sys.argv[1:])
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s [{index}] %(message)s"
    )
    keep_freed_memory()
    channel, admin = (socket.socket(fileno=descriptor) for descriptor in sockets)
    return uvloop.run(serve(index, table, channel, admin))


if __name__ == "__main__":
    sys.exit(main())
