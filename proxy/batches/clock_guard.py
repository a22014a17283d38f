"""Detects jumps of the wall clock, which would expire results.

A clock set a month ahead makes every result older than `keep_days`. After a forward jump nothing is
deleted for a day, so that an operator can correct the clock. Sleep is no jump on Linux, which
reports its duration; elsewhere deletion also pauses after a sleep.

A process detects only jumps during its own lifetime.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from math import inf

logger = logging.getLogger(__name__)

JUMP_S = 60.0  # larger than NTP's corrections between two checks
DISTRUST_S = 86_400.0  # pause of deletion after a jump


def slept_s() -> float:
    """Return how long the machine has slept since boot; 0 if not reported."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class ClockGuard:
    """Compares the wall clock with a monotonic clock that stands still during sleep."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._offset = wall() - self._now()
        self._distrusted_until = -inf

    def is_trusted(self) -> bool:
        """Return False for a day after a forward jump. Call it regularly."""
        now = self._now()
        before, self._offset = self._offset, self._wall() - now
        if (ahead := self._offset - before) > JUMP_S:
            self._distrusted_until = now + DISTRUST_S
            logger.warning(
                "batches: the wall clock jumped ahead by %.0f s; nothing is deleted for a day; "
                "check the clock",
                ahead,
            )
        return now >= self._distrusted_until

    def _now(self) -> float:
        return self._clock() + slept_s()
