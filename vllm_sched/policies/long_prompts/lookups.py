"""Which prompts are long, given what is cached of them."""

from __future__ import annotations

from collections.abc import Callable

from vllm_sched.policies.prefix_lookups import LOOK_AGAIN_S, PrefixLookups
from vllm_sched.policies.types import RequestView


class LongPromptLookups:
    """The threshold, and the results of look-ups of waiting prompts above it."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold  # tokens left to compute
        self._long = PrefixLookups()
        # Prompts that are short because of cached tokens: when to look again, and the look-up.
        self._short: dict[str, tuple[float, Callable[[], int]]] = {}
        self._no_longer_short: set[str] = set()  # found in the current step

    def begin_step(self) -> None:
        self._no_longer_short.clear()

    def cache_changed(self, now: float) -> None:
        """Look long prompts up again."""
        self._long.changed(now)

    def left_if_long(
        self, request: RequestView, cached: Callable[[], int], now: float
    ) -> int | None:
        """Return the tokens left of a waiting prompt above the threshold; None if it is short."""
        name = request.request_id
        if self._long.holds(name, now):
            return request.num_tokens - self._long.tokens(name)
        if (found := self._short.get(name)) is not None and now < found[0]:
            return None
        known = cached()
        if request.num_tokens - known <= self.threshold:
            self._long.discard(name)
            self._short[name] = now + LOOK_AGAIN_S * known, cached
            return None
        self._short.pop(name, None)
        self._long.add(name, known, now)
        return request.num_tokens - known

    def is_still_short(self, head: RequestView) -> bool:
        """Look a short prompt up again before it enters, since blocks may have been evicted."""
        name = head.request_id
        if name in self._no_longer_short:
            return False
        found = self._short.get(name)
        if found is None or head.num_tokens - found[1]() <= self.threshold:
            return True
        self._no_longer_short.add(name)
        del self._short[name]
        return False

    def admitted(self, name: str) -> None:
        self._short.pop(name, None)

    def departed(self, name: str) -> None:
        self._long.discard(name)
        self._short.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Return whether the last look-up found the prompt long."""
        return name in self._long

    def is_long(self, request: RequestView, computed: int) -> bool:
        """Return whether a prompt in prefill counts as long after `computed` tokens."""
        return request.num_tokens - computed > self.threshold and not request.num_output_tokens
