"""Logs when a worker's breaker opens and closes, and when a pool's breakers are ignored.

A failed trial is logged only for a new cause, so a worker that keeps failing is one line. Each
worker has at most one line in `QUIET_S`. Of several router processes, only the leader logs.
"""

from __future__ import annotations

import logging
from math import inf

from proxy.core.fleet.ejection import PoolKey
from proxy.core.fleet.worker import Worker

logger = logging.getLogger(__name__)

QUIET_S = 60.0

# Texts for reasons that are no status.
TROUBLES = {
    "connect": "it accepts no connections",
    "reset": "it closed the connection before its response was complete",
    "timeout": "it did not respond in time",
    "broken": "its response is not HTTP",
}


class BreakerLog:
    """Implements `BreakerListener` of the core's fleet."""

    def __init__(self) -> None:
        self._logged_at: dict[Worker, float] = {}  # within QUIET_S
        self._causes: dict[Worker, set[str]] = {}  # logged, of open breakers
        self._panics_at: dict[PoolKey, float] = {}  # last log line by pool
        self._panics: set[PoolKey] = set()  # logged panics

    def breaker_opened(self, worker: Worker, now: float) -> None:
        self._log_failure(worker, now)

    def breaker_stayed_open(self, worker: Worker, now: float) -> None:
        """Log a new cause, for example of a worker that restarted and fails in another way."""
        if worker.breaker.why not in self._causes.get(worker, ()):
            self._log_failure(worker, now)

    def _log_failure(self, worker: Worker, now: float) -> None:
        for_s, logged_at = worker.breaker.until - now, self._logged_at
        for other in [worker for worker, at in logged_at.items() if now - at >= QUIET_S]:
            del logged_at[other]
        if for_s <= 0.0 or worker in logged_at:
            return
        logged_at[worker] = now
        self._causes.setdefault(worker, set()).add(worker.breaker.why)
        logger.log(
            logging.INFO if worker.breaker.busy else logging.WARNING,
            "worker %s gets no requests for %s s: %s",
            worker.name,
            _short(for_s),
            describe_failure(worker),
        )

    def breaker_closed(self, worker: Worker) -> None:
        if self._causes.pop(worker, None) is not None:
            logger.info("worker %s responds, and gets requests again", worker.name)

    def panic_started(self, key: PoolKey, live: int, failed: int, now: float) -> None:
        if now - self._panics_at.get(key, -inf) < QUIET_S:
            return
        self._panics_at[key] = now
        self._panics.add(key)
        logger.warning(
            "%s: requests fail on %d of %d workers; breakers are ignored until more workers "
            "respond (routing.panic_threshold)",
            _pool(key),
            failed,
            live,
        )

    def panic_ended(self, key: PoolKey, live: int, failed: int) -> None:
        if key in self._panics:
            self._panics.discard(key)
            if not live:
                return  # all are down, and have lines of their own
            logger.info(
                "%s: requests fail on %d of %d workers; breakers are no longer ignored",
                _pool(key),
                failed,
                live,
            )

    def worker_removed(self, worker: Worker) -> None:
        self._logged_at.pop(worker, None)
        self._causes.pop(worker, None)


def _pool(key: PoolKey) -> str:
    model, prefills = key
    return f"model {model}, prefill workers" if prefills else f"model {model}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def describe_failure(worker: Worker) -> str:
    breaker = worker.breaker
    if breaker.why.isdecimal():
        return f"it returned {breaker.why}"
    return TROUBLES.get(breaker.why) or ("it is busy" if breaker.busy else "requests failed")


def describe_breaker(worker: Worker, now: float) -> str:
    """Return why a worker's breaker is open, and when it is tried again."""
    breaker, failure = worker.breaker, describe_failure(worker)
    if not worker.is_barred:
        return f"{failure}; breaker ignored, because too many workers of its pool fail"
    if (left_s := breaker.until - now) > 0:
        return f"{failure}; no requests for {_short(left_s)} s more"
    trial = "a request may try it" if breaker.may_send(now) else "a request is trying it"
    return f"{failure}; {trial}"
