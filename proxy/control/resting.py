"""Which workers are left alone for a while, and why: a line in the log for each, and for its end.

A trial that fails makes a rest longer and is no other one, so a worker that stays ill is one line.
Where several processes serve, the one that leads tells of all.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.worker import Worker

logger = logging.getLogger(__name__)

# By what a request met that got no answer; of one that did, its status is known.
TROUBLES = {
    "connect": "it takes no connection",
    "reset": "it closed the connection before its answer was whole",
    "stale": "it closed the connection before its answer was whole",
    "timeout": "it did not answer in time",
    "broken": "what it answered is no HTTP",
}


class Resting:
    """The `Witness` of a fleet."""

    def rests(self, worker: Worker, now: float) -> None:
        """Hear that one is left alone from now on."""
        for_s = max(worker.breaker.until - now, 0.0)
        logger.warning(
            "worker %s is left alone for %.3g s: %s", worker.name, for_s, trouble(worker)
        )

    def is_back(self, worker: Worker) -> None:
        """Hear that one is given requests again."""
        logger.info("worker %s answers, and is given requests again", worker.name)


def trouble(worker: Worker) -> str:
    """Say what the request met that a worker rests for, as far as it is known."""
    breaker = worker.breaker
    if breaker.why.isdecimal():
        return f"it answered {breaker.why}"
    return TROUBLES.get(breaker.why) or ("it is busy" if breaker.busy else "requests failed there")


def why_it_rests(worker: Worker, now: float) -> str:
    """Say that, and when it is asked again."""
    breaker = worker.breaker
    if (left_s := breaker.until - now) > 0:
        return f"{trouble(worker)}; left alone for {left_s:.2g} s more"
    trial = "the next request tries it" if breaker.lets_pass(now) else "a request tries it now"
    return f"{trouble(worker)}; {trial}"
