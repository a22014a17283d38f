"""How much of a waiting prompt need not be computed."""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.engine.steps.kv_tiers import KvTiers
from vllm_sched.engine.steps.slots import admits_requests
from vllm_sched.policies.kv_cache import KvCache
from vllm_sched.policies.long_prompts.lookups import LOOK_AGAIN_S


class RecentLookup(NamedTuple):
    request_id: str
    valid_until: float
    cached_tokens: int


class PrefixCacheLookups:
    """Look-ups of cached prefixes, kept until the cache may have changed."""

    def __init__(self, scheduler: Scheduler, kv_cache: KvCache) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self.tiers = KvTiers(scheduler.connector)
        self._cached_tokens: dict[str, int] = {}  # by request
        # The state in which they were looked up: step, running, free blocks.
        self._looked_up_in = (-1, -1, -1)
        self._now = 0.0
        self._recent = RecentLookup("", 0.0, 0)
        self.blocks_read = 0  # by the look-ups of this step

    def begin_step(self, now: float) -> None:
        self._now = now
        self.blocks_read = 0

    def cached_tokens(self, request: Request) -> int:
        """Return the tokens of a waiting request that are cached, in a tier, or handed over."""
        scheduler = self._scheduler
        if self.tiers.is_handed_over(request):
            return int(request.num_tokens)
        if request.skip_reading_prefix_cache:
            return 0
        # The cache changes as blocks are taken, and between steps. While no request may enter, an
        # old result will do.
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        state = scheduler.current_step, len(scheduler.running), free
        if self._looked_up_in != state and admits_requests(scheduler):
            self._looked_up_in = state
            self._cached_tokens.clear()
        if (tokens := self._cached_tokens.get(request.request_id)) is None:
            tokens = self._gpu_tokens(request)
            aligned = tokens - tokens % scheduler.block_size
            tokens = max(tokens, aligned + self.tiers.loadable_tokens(request, aligned))
            self._cached_tokens[request.request_id] = tokens
            self.blocks_read += self._kv_cache.blocks_at_most(tokens)
        return tokens

    def recent_cached_tokens(self, request: Request) -> int:
        """Return `cached_tokens` by the last look-up of this request, if it is recent."""
        recent = self._recent
        if recent.request_id != request.request_id or self._now > recent.valid_until:
            tokens = self.cached_tokens(request)
            valid_until = self._now + LOOK_AGAIN_S * tokens
            self._recent = recent = RecentLookup(request.request_id, valid_until, tokens)
        return recent.cached_tokens

    def _gpu_tokens(self, request: Request) -> int:
        manager = self._scheduler.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        # `get_computed_blocks` would also publish cache events.
        hit = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(hit[1])
