"""Which waiting prompts are long, given what is cached of them.

A look-up of the cached prefix takes time for each cached block, and the cache may grow in every
step. The delay before the next look-up limits the cost per waiting prompt to 1 % of the engine's
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from vllm_sched.policies.types import RequestView

# Delay per cached token: 100 times the 50 ns of a look-up.
LOOK_AGAIN_S: Final = 5e-6


class Lookup(NamedTuple):
    """One look-up of a waiting prompt's cached prefix."""

    valid_until: float
    left: int  # tokens to compute
    cached: Callable[[], int]  # looks up again


class LongPromptLookups:
    """The threshold, and the last look-up of each waiting prompt above it."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold  # tokens left to compute
        self._found: dict[str, Lookup] = {}

    def long_tokens_left(
        self, request: RequestView, cached: Callable[[], int], now: float
    ) -> int | None:
        """Return the tokens left of a waiting prompt above the threshold; None if it is short."""
        # A preempted request with output is short: shorts would take its KV blocks.
        if not self.is_long(request, 0):
            return None
        found = self._found.get(request.request_id)
        if found is None or now > found.valid_until:
            known = cached()
            found = Lookup(now + LOOK_AGAIN_S * known, request.num_tokens - known, cached)
            self._found[request.request_id] = found
        return found.left if found.left > self.threshold else None

    def is_still_short(self, head: RequestView) -> bool:
        """Look a short prompt up again before it enters, since blocks may have been evicted."""
        found = self._found.get(head.request_id)
        if found is None:
            return True
        if found.left <= self.threshold:
            left = head.num_tokens - found.cached()
            self._found[head.request_id] = found = found._replace(left=left)
        return found.left <= self.threshold

    def forget(self, name: str) -> None:
        self._found.pop(name, None)

    def __contains__(self, name: str | None) -> bool:
        """Return whether the last look-up found the prompt long."""
        found = None if name is None else self._found.get(name)
        return found is not None and found.left > self.threshold

    def is_long(self, request: RequestView, computed: int) -> bool:
        """Return whether a prompt in prefill counts as long after `computed` tokens."""
        return request.num_tokens - computed > self.threshold and not request.num_output_tokens
