"""The moments at which all hosts publish, so that each wakes once for the messages of all."""

from __future__ import annotations

import time

PUBLISH_INTERVAL_S = 0.02
MIN_PAUSE_S, FLUSH_S = 0.005, 0.003  # a host's only process writes its changes before each moment


def until_publish() -> float:
    """Return the time until the next update, by the time of day."""
    left = PUBLISH_INTERVAL_S - time.time() % PUBLISH_INTERVAL_S
    return left if left > MIN_PAUSE_S else left + PUBLISH_INTERVAL_S


def until_flush() -> float:
    return PUBLISH_INTERVAL_S - (time.time() + FLUSH_S) % PUBLISH_INTERVAL_S
