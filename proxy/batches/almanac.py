"""Whether the time of day may decide what is forgotten.

A clock that is set wrong, a month ahead, makes every result older than `keep_days`. After such a
jump nothing is forgotten for a day, in which it can be set right. A machine that slept seems to
jump too, and what it forgets is kept a day longer.

Only a process that saw the clock before knows of a jump: one that begins believes what it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

logger = logging.getLogger(__name__)

JUMP_S = 60.0  # no clock is set right so coarsely between two looks
DOUBT_S = 86_400.0


class Almanac:
    """Compares the time of day with a clock that nobody sets."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._offset = wall() - clock()
        self._doubted_until = -inf

    def is_believed(self) -> bool:
        """Whether the clock has not jumped ahead of late; to be asked now and then."""
        now = self._clock()
        before, self._offset = self._offset, self._wall() - now
        if (ahead := self._offset - before) > JUMP_S:
            self._doubted_until = now + DOUBT_S
            logger.warning(
                "batches: the clock of this machine jumped ahead by %.0f s; nothing is forgotten "
                "for a day; is it right?",
                ahead,
            )
        return now >= self._doubted_until
