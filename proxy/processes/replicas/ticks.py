"""Return the wait until the next publishing time, a multiple of 20 ms of the wall clock.

Small changes wait for a multiple of 100 ms. All hosts use the same times, so each wakes once for
all messages.
"""

from __future__ import annotations

import asyncio
import time

PUBLISH_INTERVAL_S, SMALL_INTERVAL_S = 0.02, 0.1
MIN_PAUSE_S, FLUSH_LEAD_S = 0.005, 0.003  # changes are written before


def until_publish(interval_s: float = PUBLISH_INTERVAL_S, pause_s: float = MIN_PAUSE_S) -> float:
    left = interval_s - time.time() % interval_s
    return left if left > pause_s else left + interval_s


def until_flush() -> float:
    return PUBLISH_INTERVAL_S - (time.time() + FLUSH_LEAD_S) % PUBLISH_INTERVAL_S


class PublishTimes:
    """Waits until changes are to be published."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Publish an urgent change at the next time."""
        self._woken.set()

    async def wait(self, *, urgent: bool) -> bool:
        """Wait for the next time; return True if small changes are due too.

        `urgent`: there are urgent changes already.
        """
        if urgent:
            self._woken.clear()
            await asyncio.sleep(until_publish())
            return False
        try:
            async with asyncio.timeout(until_publish(SMALL_INTERVAL_S)):
                await self._woken.wait()
        except TimeoutError:
            return True
        self._woken.clear()
        await asyncio.sleep(until_publish(pause_s=0.0))
        return False
