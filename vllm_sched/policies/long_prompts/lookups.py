"""Which waiting prompts are short, medium or long, given what is cached of them.

A look-up takes time for each cached block. The delay before the next one limits the cost per
waiting prompt to 1 % of the engine's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from vllm_sched.errors import UsageError
from vllm_sched.policies.types import EngineFacts, RequestView

SHORT, MEDIUM, LONG = "short", "medium", "long"
# Of max_model_len and at most MAX_SHARE_TOKENS, but at least the budget: the default threshold.
THRESHOLD_SHARE: Final = 0.04
MAX_SHARE_TOKENS: Final = 8_192
MAX_SHORT_TOKENS: Final = 2_048
# Delay per cached token: 100 times the 50 ns of a look-up.
LOOK_AGAIN_S: Final = 5e-6


class Lookup(NamedTuple):
    valid_until: float
    tokens_left: int
    cached_tokens: Callable[[], int]  # looks up again


class LengthLookups:
    """The bounds of lengths, and the last look-up of each waiting prompt above the shortest."""

    def __init__(self, facts: EngineFacts, threshold: int) -> None:
        context, budget = facts.max_model_len, facts.max_num_batched_tokens
        if threshold > context:
            raise UsageError(
                f"long_prompt.long_prefill_token_threshold={threshold} exceeds max_model_len="
                f"{context}, so no prompt would be long; give 0 to {context}"
            )
        share = min(int(context * THRESHOLD_SHARE), MAX_SHARE_TOKENS)
        # Prompts with more tokens left are long; a prompt that fits a step is not.
        self.threshold = threshold or max(share, budget)
        self.max_short = min(MAX_SHORT_TOKENS, budget, self.threshold)
        if not facts.chunked_prefill:  # a whole prompt would wait for a step without shorts
            self.max_short = self.threshold
        self._by_priority = facts.orders_by_priority
        self._by_request: dict[str, Lookup] = {}

    def lane(self, request: RequestView, cached: Callable[[], int], now: float) -> str:
        """Return the lane of a waiting prompt; mediums and longs of about one length share it."""
        # A preempted request with output is short: shorts would take its KV blocks.
        if request.num_tokens <= self.max_short or request.num_output_tokens:
            return SHORT
        lookup = self._by_request.get(request.request_id)
        if lookup is None or now > lookup.valid_until:
            tokens = cached()
            lookup = Lookup(now + LOOK_AGAIN_S * tokens, request.num_tokens - tokens, cached)
            self._by_request[request.request_id] = lookup
        if (left := lookup.tokens_left) <= self.max_short:
            return SHORT
        kind = LONG if left > self.threshold else MEDIUM
        return kind if self._by_priority else f"{kind}/{left.bit_length()}"

    def tokens_left(self, request: RequestView) -> int:
        lookup = self._by_request.get(request.request_id)
        return request.num_tokens if lookup is None else lookup.tokens_left

    def is_still_short(self, head: RequestView) -> bool:
        """Look a short prompt up again before it enters, since blocks may have been evicted."""
        lookup = self._by_request.get(head.request_id)
        if lookup is None:
            return True
        if lookup.tokens_left <= self.max_short:
            tokens_left = head.num_tokens - lookup.cached_tokens()
            lookup = lookup._replace(tokens_left=tokens_left)
            self._by_request[head.request_id] = lookup
        return lookup.tokens_left <= self.max_short

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def was_long(self, request_id: str | None) -> bool:
        """Return whether the last look-up found the prompt long."""
        lookup = None if request_id is None else self._by_request.get(request_id)
        return lookup is not None and lookup.tokens_left > self.threshold

    def was_medium(self, request_id: str | None) -> bool:
        """Return whether the last look-up found the prompt medium."""
        lookup = None if request_id is None else self._by_request.get(request_id)
        return lookup is not None and self.max_short < lookup.tokens_left <= self.threshold

    def is_long(self, request: RequestView, computed: int) -> bool:
        """Return whether a prompt in prefill counts as long after `computed` tokens."""
        return request.num_tokens - computed > self.threshold and not request.num_output_tokens
