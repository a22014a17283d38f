"""Kills router processes that hang or never start to serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from proxy.processes.child import Child
from proxy.processes.shared.process_sheet import ALIVE
from proxy.processes.shared.shared_memory import SharedTable

logger = logging.getLogger(__name__)

# Hang of an event loop before its process is killed; interval of checks.
HANG_S, CHECK_INTERVAL_S = 30.0, 1.0
START_TIMEOUT_S = 120.0  # maximum time from start to serving, on slow machines too
# A check that is this many intervals late means that the machine itself was suspended.
MAX_LATE_CHECKS = 5


async def kill_hung(children: Mapping[int, Child], table: SharedTable) -> None:
    """Kill processes that hang or never serve, unless the whole machine was suspended."""
    checked = since = time.monotonic()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = time.monotonic()
        if now - checked > MAX_LATE_CHECKS * CHECK_INTERVAL_S:
            since = now
        checked = now
        for child in children.values():
            alive_at = table.sheet(child.index).count(ALIVE)
            if not child.serving:
                if max(child.began, since) < now - START_TIMEOUT_S:
                    age_s = now - child.began
                    logger.error("%s does not serve after %d s; killing it", child, age_s)
                    child.process.kill()
            elif alive_at and max(alive_at, since) < now - HANG_S:
                logger.error("%s hung for %d s; killing it", child, now - alive_at)
                child.process.kill()
