"""Circuit breaker of one worker.

Three failures in a row, or one response 429 or 503, open the breaker. It stays open for a time that
doubles with each opening, or for the worker's Retry-After. Then one request at a time passes on
trial. Its first token closes the breaker, its failure opens it again.

A trial is due after the pause that doubles, also if the Retry-After is shorter, and after the
longest pause if the last trial had no result: the worker may hang.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

FAILURES_TO_OPEN = 3
MIN_OPEN_S, MAX_OPEN_S = 0.5, 30.0
TRIAL_INTERVAL_S = 2.0
MAX_RETRY_AFTER_S = 300.0
FAILED, BUSY = "failed", "busy"
TRIAL_WITHOUT_RESULT = -math.inf


class BreakerSnapshot(NamedTuple):
    closed: bool = True
    busy: bool = False
    until: float = 0.0
    failures: int = 0
    openings: int = 0
    tried_at: float = 0.0  # 0: no trial
    why: str = ""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # a trial may pass


class Breaker:
    __slots__ = (
        "_failures", "_last_trial_at", "_openings", "_tried_at",
        "busy", "closed", "opened", "until", "why",
    )  # fmt: skip

    def __init__(self) -> None:
        self.closed = True
        self.busy = False  # the cause was busy, not a failure
        self.why = ""  # HTTP status or name of an error
        self.until = 0.0
        # By cause, without failed trials.
        self.opened = {FAILED: 0, BUSY: 0}
        self._failures = 0
        self._openings = 0
        self._tried_at: float | None = None
        self._last_trial_at = -math.inf  # also after its result

    @property
    def has_no_failures(self) -> bool:
        """Return whether none failed since the last success."""
        return self.closed and not self._failures

    def state(self, now: float) -> BreakerState:
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self.until else BreakerState.OPEN

    def may_send(self, now: float) -> bool:
        if self.closed:
            return True
        return now >= self.until and (
            self._tried_at is None or now - self._tried_at >= TRIAL_INTERVAL_S
        )

    def is_trial_due(self, now: float) -> bool:
        """Return whether a request should try the worker, even if a rule prefers others."""
        if self.closed or now < self.until:
            return False
        pause_s = pause(self._openings - 1) if self._tried_at is None else MAX_OPEN_S
        return now - self._last_trial_at >= pause_s

    def record_sent(self, now: float) -> bool:
        """Note a sent request; True if it is a trial."""
        if self.closed:
            return False
        self._tried_at = self._last_trial_at = now
        return True

    def record_success(self) -> None:
        self.closed = True
        self.busy = False
        self.why = ""
        self._failures = self._openings = 0
        self._tried_at, self._last_trial_at = None, -math.inf

    def record_failure(
        self, now: float, retry_after_s: float | None = None, *, busy: bool = False, why: str = ""
    ) -> None:
        """Count a failure; open the breaker if it has too many."""
        pause_s = retry_after_s if retry_after_s is not None and retry_after_s >= 0 else None
        self._failures += 1
        if self.closed and self._failures < FAILURES_TO_OPEN and not busy and pause_s is None:
            return
        if not self.closed and now < self.until and pause_s is None:
            return  # sent before the opening
        rest = pause(self._openings)
        if pause_s is not None:
            rest = min(pause_s, MAX_RETRY_AFTER_S)
        # Requests sent before the opening fail too, and count once.
        if self.closed or self._tried_at is not None:
            self._openings += 1
        if self.closed:
            self.opened[BUSY if busy else FAILED] += 1
        self.closed = False
        self.busy = busy
        self.why = why
        self._tried_at = None
        self.until = max(self.until, now + rest)

    def snapshot(self) -> BreakerSnapshot:
        return BreakerSnapshot(
            self.closed, self.busy, self.until, self._failures, self._openings,
            self._tried_at or 0.0, self.why,
        )  # fmt: skip

    def copy_state(self, snapshot: BreakerSnapshot) -> None:
        """Take the state of another process's breaker.

        The opening counts here too: a sum over processes would count one crash several times.
        """
        was_closed = self.closed
        self.closed, self.busy, self.until = snapshot.closed, snapshot.busy, snapshot.until
        self._failures, self._openings = snapshot.failures, snapshot.openings
        tried_at, self.why = snapshot.tried_at, snapshot.why
        self._tried_at = tried_at or None
        self._last_trial_at = max(self._last_trial_at, tried_at or -math.inf)
        if was_closed and not self.closed:
            self.opened[BUSY if self.busy else FAILED] += 1

    def abandon_trial(self) -> None:
        """Allow another trial: the last one has no result."""
        self._tried_at = TRIAL_WITHOUT_RESULT


def pause(openings: int) -> float:
    """Return the seconds that a breaker stays open after as many openings before."""
    return min(MIN_OPEN_S * 2.0 ** min(openings, 16), MAX_OPEN_S)
