"""Which workers are left alone for a while, and why: a line in the log for each, and for its end.

A pool whose breakers are ignored, because too few of its workers are well, is a line too.

A trial that fails makes a rest longer and is no other one, so a worker that stays ill is one line.
One that is busy now and again is so in one line a minute, and not a warning. Where several
processes serve, the one that leads tells of all.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fleet.ejection import Key
    from proxy.core.fleet.worker import Worker

logger = logging.getLogger(__name__)

QUIET_S = 60.0  # after a line about a worker, in which its other rests have none

# By what a request met that got no answer; of one that did, its status is known.
TROUBLES = {
    "connect": "it takes no connection",
    "reset": "it closed the connection before its answer was whole",
    "timeout": "it did not answer in time",
    "broken": "what it answered is no HTTP",
}


class BreakerLog:
    """The `Witness` of a fleet."""

    def __init__(self) -> None:
        self._told_at: dict[Worker, float] = {}  # of late, that one rests
        self._awaited: set[Worker] = set()  # whose rest was told, and its end was not
        self._panics_at: dict[Key, float] = {}  # when a panic was told last, by pool
        self._panics: set[Key] = set()  # pools whose panic was told, and its end was not

    def rests(self, worker: Worker, now: float) -> None:
        """Hear that one is left alone from now on."""
        for_s, told_at = worker.breaker.until - now, self._told_at
        for other in [each for each, at in told_at.items() if now - at >= QUIET_S]:
            del told_at[other]
        if for_s <= 0.0 or worker in told_at:
            return
        told_at[worker] = now
        self._awaited.add(worker)
        logger.log(
            logging.INFO if worker.breaker.busy else logging.WARNING,
            "worker %s is left alone for %s s: %s",
            worker.name,
            _short(for_s),
            trouble(worker),
        )

    def is_back(self, worker: Worker) -> None:
        """Hear that one is given requests again."""
        if worker in self._awaited:
            self._awaited.discard(worker)
            logger.info("worker %s answers, and is given requests again", worker.name)

    def panics(self, key: Key, live: int, out: int, now: float) -> None:
        """Note that a pool's breakers are ignored from now on."""
        if now - self._panics_at.get(key, -inf) < QUIET_S:
            return
        self._panics_at[key] = now
        self._panics.add(key)
        logger.warning(
            "%s: requests fail on %d of %d workers, so requests go to all of them until more are "
            "well (routing.panic_threshold)",
            _pool(key),
            out,
            live,
        )

    def heeds(self, key: Key, live: int, out: int) -> None:
        """Note that a pool's breakers are heeded again."""
        if key in self._panics:
            self._panics.discard(key)
            logger.info(
                "%s: requests fail on %d of %d workers; workers that fail are left alone again",
                _pool(key),
                out,
                live,
            )

    def has_left(self, worker: Worker) -> None:
        """Forget one that was taken out."""
        self._told_at.pop(worker, None)
        self._awaited.discard(worker)


def _pool(key: Key) -> str:
    model, prefills = key
    return f"model {model}, prefill workers" if prefills else f"model {model}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def trouble(worker: Worker) -> str:
    """Say what the request met that a worker rests for, as far as it is known."""
    breaker = worker.breaker
    if breaker.why.isdecimal():
        return f"it answered {breaker.why}"
    return TROUBLES.get(breaker.why) or ("it is busy" if breaker.busy else "requests failed there")


def why_it_rests(worker: Worker, now: float) -> str:
    """Say that, and when it is asked again."""
    breaker = worker.breaker
    if not worker.barred:
        return f"{trouble(worker)}; asked even so, because too few of its pool are well"
    if (left_s := breaker.until - now) > 0:
        return f"{trouble(worker)}; left alone for {_short(left_s)} s more"
    trial = "the next request tries it" if breaker.lets_pass(now) else "a request tries it now"
    return f"{trouble(worker)}; {trial}"
