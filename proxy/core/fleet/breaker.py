"""Keep requests from a worker that fails, for a while.

Closed, it lets everything pass. A few failures in a row, or one plea of the worker itself to stay
away (429, 503), open it for a while that doubles each time, or for as long as the worker asked.
Then one request at a time is let through on trial: its first token closes the breaker, its failure
opens it again. A trial that has told nothing yet after a while does not bar the next.
"""

from __future__ import annotations

import math
from enum import StrEnum

FAILURES = 3
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
TRIAL_S = 2.0
LONGEST_ASKED_S = 300.0  # a worker's Retry-After beyond this is not believed
# Why one opens: its worker failed, or said that it is busy.
FAILED, BUSY = "failed", "busy"
LONG_AGO = -math.inf  # when a trial was sent that told nothing: it keeps no other from being sent


# Closed, busy, until, failures, openings, tried at (0: no trial is out), and why.
Told = tuple[bool, bool, float, int, int, float, str]


class BreakerState(StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one request is out on trial


class Breaker:
    """One worker's."""

    __slots__ = ("_failures", "_openings", "_tried_at", "busy", "closed", "opened", "until", "why")

    def __init__(self) -> None:
        self.closed = True
        self.busy = False  # opened because the worker was busy, not because it failed
        self.why = ""  # what the request met that opened it: a status, or a trouble's name
        self.until = 0.0
        # How often, and why; a trial that fails does not count, nor what another process saw.
        self.opened = {FAILED: 0, BUSY: 0}
        self._failures = 0  # in a row
        self._openings = 0
        self._tried_at: float | None = None

    @property
    def spotless(self) -> bool:
        """Whether nothing has failed since the last success."""
        return self.closed and not self._failures

    def state(self, now: float) -> BreakerState:
        """Name the state."""
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self.until else BreakerState.OPEN

    def lets_pass(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self.closed:
            return True
        return now >= self.until and (self._tried_at is None or now - self._tried_at >= TRIAL_S)

    def sent(self, now: float) -> bool:
        """Note that a request was sent; tell whether it is a trial."""
        if self.closed:
            return False
        self._tried_at = now
        return True

    def succeeded(self) -> None:
        """Close."""
        self.closed = True
        self.busy = False
        self.why = ""
        self._failures = self._openings = 0
        self._tried_at = None

    def failed(
        self,
        now: float,
        retry_after_s: float | None = None,
        *,
        busy: bool = False,
        why: str = "",
    ) -> None:
        """Count a failure, and open once they are too many."""
        asked = retry_after_s if retry_after_s is not None and retry_after_s >= 0 else None
        self._failures += 1
        if self.closed and self._failures < FAILURES and not busy and asked is None:
            return
        if not self.closed and now < self.until and asked is None:
            return  # others that were under way fail too: known already
        rest = min(FIRST_REST_S * 2.0 ** min(self._openings, 16), LONGEST_REST_S)
        if asked is not None:
            rest = min(asked, LONGEST_ASKED_S)
        # What was sent before fails too, or asks for the same: thirty of these are one opening. But
        # a trial that told nothing may be blamed yet.
        if self.closed or self._tried_at is not None:
            self._openings += 1
        if self.closed:
            self.opened[BUSY if busy else FAILED] += 1
        self.closed = False
        self.busy = busy
        self.why = why
        self._tried_at = None
        self.until = max(self.until, now + rest)

    def told(self) -> Told:
        """Say all there is, for a breaker of the same worker in another process."""
        tried_at = self._tried_at or 0.0
        counts = self._failures, self._openings
        return self.closed, self.busy, self.until, *counts, tried_at, self.why

    def take(self, told: Told) -> None:
        """Become what another one was.

        One that it opened counts here, too: of a crash that many see at once each may have counted
        one, which a sum would take for as many crashes.
        """
        was_closed = self.closed
        self.closed, self.busy, self.until = told[:3]
        self._failures, self._openings, tried_at, self.why = told[3:]
        self._tried_at = tried_at or None
        if was_closed and not self.closed:
            self.opened[BUSY if self.busy else FAILED] += 1

    def abandoned(self) -> None:
        """Note that the trial ended without telling anything: another may be sent."""
        self._tried_at = LONG_AGO
