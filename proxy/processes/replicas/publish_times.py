"""The times at which hosts publish their changes: multiples of 20 ms of the wall clock.

Small changes wait for a multiple of 100 ms. All hosts use the same times, so each wakes once for
all messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PUBLISH_INTERVAL_S, SMALL_INTERVAL_S = 0.02, 0.1
MIN_PAUSE_S, FLUSH_LEAD_S = 0.005, 0.003  # changes are written earlier by the lead
TIMER_ERROR_S = 0.0015  # by which a timer may fire early; its time must not be waited for again


def until_publish_s(interval_s: float = PUBLISH_INTERVAL_S, pause_s: float = MIN_PAUSE_S) -> float:
    return _until_next_s(time.time(), interval_s, pause_s)


def until_flush_s(interval_s: float = PUBLISH_INTERVAL_S) -> float:
    return _until_next_s(time.time() + FLUSH_LEAD_S, interval_s, TIMER_ERROR_S)


def _until_next_s(now: float, interval_s: float, pause_s: float) -> float:
    """Return the time until a multiple of the interval that is further away than the pause."""
    left = interval_s - now % interval_s
    return left if left > pause_s else left + interval_s


class FlushTimer:
    """Has a host's only process write its changes before the supervisor publishes them."""

    def __init__(self, has_urgent: Callable[[], bool]) -> None:
        self._has_urgent = has_urgent
        self._small_at = 0.0

    def start(self, flush: Callable[[], None]) -> None:
        """Call `flush` once, earlier if there are urgent changes."""
        self._small_at = time.time() + until_flush_s(SMALL_INTERVAL_S) - FLUSH_LEAD_S
        self._wait(flush)

    def _wait(self, flush: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(until_flush_s(), self._check, flush)

    def _check(self, flush: Callable[[], None]) -> None:
        if time.time() >= self._small_at or self._has_urgent():
            flush()
        else:
            self._wait(flush)


class PublishTimes:
    def __init__(self) -> None:
        self._is_woken = False
        self._wait_ends: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Publish an urgent change at the next time."""
        self._is_woken = True
        if self._wait_ends is not None:
            _end(self._wait_ends)

    async def wait(self, *, urgent: bool) -> bool:
        """Wait for the next time; return True if small changes are due too.

        `urgent`: there are urgent changes already.
        """
        if urgent:
            self._is_woken = False
            await asyncio.sleep(until_publish_s())
            return False
        if not self._is_woken:
            loop = asyncio.get_running_loop()
            ends = self._wait_ends = loop.create_future()
            # Unlike `asyncio.timeout`, this raises nothing.
            timer = loop.call_later(until_publish_s(SMALL_INTERVAL_S), _end, ends)
            try:
                await ends
            finally:
                timer.cancel()
                self._wait_ends = None
        if not self._is_woken:
            return True
        self._is_woken = False
        if (left_s := until_publish_s(pause_s=0.0)) > FLUSH_LEAD_S:
            await asyncio.sleep(left_s)
        return False


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
