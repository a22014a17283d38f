"""What the server has charged a tenant in advance of its requests, while its limits are far.

A busy process asks for twice what comes in a moment, and returns what did not come.
"""

from __future__ import annotations

MOMENT_S = 0.1
MIN_REQUESTS = 2  # in a moment; fewer are asked for one by one
GROWTH = 2


class LimitAdvance:
    __slots__ = ("_counted", "_since", "_usual", "requests", "tokens")

    def __init__(self, now: float) -> None:
        self.requests = self.tokens = 0  # not used yet
        self._since = now
        # Requests and tokens since then, and in a moment before.
        self._counted = self._usual = (0, 0)

    def take(self, tokens: int) -> bool:
        """Use the advance for a request; return False if it is not enough."""
        requests, before = self._counted
        self._counted = requests + 1, before + tokens
        if self.requests < 1 or self.tokens < tokens:
            return False
        self.requests -= 1
        self.tokens -= tokens
        return True

    def change(self, now: float) -> tuple[int, int]:
        """Return the requests and tokens to ask for; negative ones are given up now."""
        requests, tokens = self._counted
        if (passed_s := now - self._since) >= MOMENT_S:
            share = MOMENT_S / passed_s
            self._usual = int(requests * share), int(tokens * share)
            self._counted, self._since = (0, 0), now
            requests = tokens = 0
        requests, tokens = max(requests, self._usual[0]), max(tokens, self._usual[1])
        if requests < MIN_REQUESTS:
            requests = tokens = 0
        more = GROWTH * requests - self.requests, GROWTH * tokens - self.tokens
        self.add(min(more[0], 0), min(more[1], 0))
        return more

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
