"""Return the wait until the next publishing time, a multiple of 20 ms of the wall clock.

All hosts use the same times, so each wakes once for all messages.
"""

from __future__ import annotations

import time

PUBLISH_INTERVAL_S = 0.02
MIN_PAUSE_S, FLUSH_LEAD_S = 0.005, 0.003  # changes are written before


def until_publish() -> float:
    left = PUBLISH_INTERVAL_S - time.time() % PUBLISH_INTERVAL_S
    return left if left > MIN_PAUSE_S else left + PUBLISH_INTERVAL_S


def until_flush() -> float:
    return PUBLISH_INTERVAL_S - (time.time() + FLUSH_LEAD_S) % PUBLISH_INTERVAL_S
