"""Keep requests from a worker that fails, for a while.

Closed, it lets everything pass. A few failures in a row, or one plea of the worker itself to stay
away (429, 503), open it for a while that doubles each time, or for as long as the worker asked.
Then it lets one request through: that one's end closes it or opens it again.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES = 3
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
LONGEST_ASKED_S = 300.0  # a worker's Retry-After beyond this is not believed


class State(StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one request is out on trial


class Breaker:
    """One worker's."""

    __slots__ = ("_failures", "_on_trial", "_openings", "busy", "closed", "until")

    def __init__(self) -> None:
        self.closed = True
        self.busy = False  # opened because the worker was busy, not because it failed
        self.until = 0.0
        self._failures = 0
        self._openings = 0
        self._on_trial = False

    def state(self, now: float) -> State:
        """Name the state."""
        if self.closed:
            return State.CLOSED
        return State.HALF_OPEN if now >= self.until else State.OPEN

    def lets_pass(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.closed or (now >= self.until and not self._on_trial)

    def sent(self) -> bool:
        """Note that a request was sent; tell whether it is the trial."""
        if self.closed:
            return False
        self._on_trial = True
        return True

    def succeeded(self) -> None:
        """Close."""
        if not self.closed or self._failures:
            self.closed = True
            self.busy = self._on_trial = False
            self._failures = self._openings = 0

    def failed(self, now: float, retry_after_s: float | None = None, *, busy: bool = False) -> None:
        """Count a failure, and open once they are too many."""
        self._failures += 1
        asked = retry_after_s is not None
        if self.closed and self._failures < FAILURES and not busy and not asked:
            return
        if not self.closed and not self._on_trial and now < self.until and not asked:
            return  # others that were under way fail too: known already
        rest = min(FIRST_REST_S * 2.0 ** min(self._openings, 16), LONGEST_REST_S)
        if retry_after_s is not None:
            rest = min(max(retry_after_s, 0.0), LONGEST_ASKED_S)
        self.closed = False
        self.busy = busy
        self._on_trial = False
        self._openings += 1
        self.until = max(self.until, now + rest)

    def abandoned(self) -> None:
        """Note that the trial ended without telling anything: another may be sent."""
        self._on_trial = False
