"""How many retries the fleet can bear.

Each request earns a share of a retry and a retry spends one, so that a fleet which fails every
request is not asked three times over. A few are there from the start and come back with time: one
failure on a quiet fleet is always worth another try.
"""

from __future__ import annotations

AT_REST = 10.0
PER_S = 1.0


class RetryBudget:
    """The whole fleet's."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved = AT_REST
        self._at = 0.0

    def earn(self) -> None:
        """Count a request that was not a retry."""
        if self._saved < AT_REST:
            self._saved += self.share

    def spend(self, now: float) -> bool:
        """Take a retry; False when there is none left."""
        if self.share <= 0:
            return False
        self._saved = min(self._saved + max(now - self._at, 0.0) * PER_S, AT_REST)
        self._at = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
