"""A process of the router, as its supervisor sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from proxy.processes.channel import Channel


class Child:
    """One process, from its beginning to its end."""

    def __init__(self, index: int, process: asyncio.subprocess.Process) -> None:
        self.index = index
        self.process = process
        self.channel: Channel
        self.joined = False
        self.serving = False
        self.missed = False  # something of what the leader said
        self.began = time.monotonic()

    def __repr__(self) -> str:
        """Name it, as logs do."""
        return f"router process {self.index} ({self.process.pid})"
