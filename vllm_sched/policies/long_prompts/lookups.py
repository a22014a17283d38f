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
    valid_until: float
    tokens_left: int
    cached_tokens: Callable[[], int]  # looks up again


class LongPromptLookups:
    """The threshold, and the last look-up of each waiting prompt above it."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold  # tokens left to compute
        self._by_request: dict[str, Lookup] = {}

    def long_tokens_left(
        self, request: RequestView, cached: Callable[[], int], now: float
    ) -> int | None:
        """Return the tokens left of a waiting prompt above the threshold; None if it is short."""
        # A preempted request with output is short: shorts would take its KV blocks.
        if not self.is_long(request, 0):
            return None
        lookup = self._by_request.get(request.request_id)
        if lookup is None or now > lookup.valid_until:
            tokens = cached()
            lookup = Lookup(now + LOOK_AGAIN_S * tokens, request.num_tokens - tokens, cached)
            self._by_request[request.request_id] = lookup
        return lookup.tokens_left if lookup.tokens_left > self.threshold else None

    def is_still_short(self, head: RequestView) -> bool:
        """Look a short prompt up again before it enters, since blocks may have been evicted."""
        lookup = self._by_request.get(head.request_id)
        if lookup is None:
            return True
        if lookup.tokens_left <= self.threshold:
            tokens_left = head.num_tokens - lookup.cached_tokens()
            lookup = lookup._replace(tokens_left=tokens_left)
            self._by_request[head.request_id] = lookup
        return lookup.tokens_left <= self.threshold

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def was_long(self, request_id: str | None) -> bool:
        """Return whether the last look-up found the prompt long."""
        lookup = None if request_id is None else self._by_request.get(request_id)
        return lookup is not None and lookup.tokens_left > self.threshold

    def is_long(self, request: RequestView, computed: int) -> bool:
        """Return whether a prompt in prefill counts as long after `computed` tokens."""
        return request.num_tokens - computed > self.threshold and not request.num_output_tokens
