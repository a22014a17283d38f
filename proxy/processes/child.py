"""A router process as its supervisor sees it."""

from __future__ import annotations

import asyncio
import time

from proxy.processes.channel import Channel


class Child:
    """One router process, from its start to its exit."""

    def __init__(self, index: int, process: asyncio.subprocess.Process) -> None:
        self.index = index
        self.process = process
        self.channel: Channel
        self.joined = False
        self.serving = False
        self.missed = False  # True if it did not get some of the leader's changes
        self.began = time.monotonic()

    def __repr__(self) -> str:
        return f"router process {self.index} ({self.process.pid})"
