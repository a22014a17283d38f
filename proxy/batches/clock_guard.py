"""Whether the time of day may decide what is forgotten.

A clock that is set wrong, a month ahead, makes every result older than `keep_days`. After such a
jump nothing is forgotten for a day, in which it can be set right. Sleep is no jump where the system
tells how long the machine slept, as Linux does; elsewhere what it forgets is kept a day longer.

Only a process that saw the clock before knows of a jump: one that begins believes what it finds.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from math import inf

logger = logging.getLogger(__name__)

JUMP_S = 60.0  # no clock is set right so coarsely between two looks
DOUBT_S = 86_400.0


def slept_s() -> float:
    """Tell how long the machine has slept since it began; 0 where the system does not."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class ClockGuard:
    """Compares the time of day with a clock that nobody sets, and that stands still in sleep."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], float],
        slept: Callable[[], float] = slept_s,
    ) -> None:
        self._clock, self._wall, self._slept = clock, wall, slept
        self._offset = wall() - self._now()
        self._doubted_until = -inf

    def is_believed(self) -> bool:
        """Whether the clock has not jumped ahead of late; to be asked now and then."""
        now = self._now()
        before, self._offset = self._offset, self._wall() - now
        if (ahead := self._offset - before) > JUMP_S:
            self._doubted_until = now + DOUBT_S
            logger.warning(
                "batches: the clock of this machine jumped ahead by %.0f s; nothing is forgotten "
                "for a day; is it right?",
                ahead,
            )
        return now >= self._doubted_until

    def _now(self) -> float:
        return self._clock() + self._slept()
