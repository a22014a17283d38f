"""Waits for a port that an earlier, draining router still holds."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_WAIT_S, RETRY_INTERVAL_S = 3.0, 0.1  # total without the notice; pause between tries


async def retry_until_free(take: Callable[[], Awaitable[T]], notice_s: float) -> T:
    """Call `take` until its port is free; raise OSError after the time limit."""
    give_up = time.monotonic() + MAX_WAIT_S + notice_s
    logged = False
    while True:
        try:
            return await take()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                raise
            if not logged:
                logged = True
                logger.warning("%s; retrying: an earlier router may still drain", error)
        await asyncio.sleep(RETRY_INTERVAL_S)
