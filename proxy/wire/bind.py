"""Ports that an earlier router may still have: its processes drain, and let go of them soon."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

LET_GO_S, TRY_S = 3.0, 0.1  # that they may keep them, beside their notice; between two tries


async def once_free(take: Callable[[], Awaitable[T]], notice_s: float) -> T:
    """Take a port once whoever has it lets go; raises OSError where that takes too long."""
    give_up = time.monotonic() + LET_GO_S + notice_s
    said = False
    while True:
        try:
            return await take()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                raise
            if not said:
                said = True
                logger.warning("%s; tried again, for an earlier router may still drain", error)
        await asyncio.sleep(TRY_S)
