"""How much of a waiting prompt need not be computed."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.engine.steps.slots import admits_requests
from vllm_sched.policies.kv_cache import KvCache


class PrefixCacheLookups:
    """Look-ups of cached prefixes, kept until the cache may have changed."""

    def __init__(self, scheduler: Scheduler, kv_cache: KvCache) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._known: dict[str, int] = {}  # cached tokens, by request
        # The state in which they were looked up: step, running, free blocks.
        self._known_in = (-1, -1, -1)
        self.blocks_read = 0  # by the look-ups of this step

    def begin_step(self) -> None:
        self.blocks_read = 0

    def tokens(self, request: Request) -> int:
        """Return the tokens of a waiting request that are cached or transferred."""
        scheduler = self._scheduler
        # A client may set this field without a connector.
        transfer = request.kv_transfer_params if scheduler.connector is not None else None
        if isinstance(transfer, dict) and transfer.get("do_remote_prefill"):
            return int(request.num_tokens)
        manager = scheduler.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        # The cache changes as blocks are taken, and between steps. While no request may enter, an
        # old result will do.
        free = manager.block_pool.get_num_free_blocks()
        state = scheduler.current_step, len(scheduler.running), free
        if self._known_in != state and admits_requests(scheduler):
            self._known_in = state
            self._known.clear()
        if (known := self._known.get(request.request_id)) is None:
            # `get_computed_blocks` would also publish cache events.
            hit = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
            known = self._known[request.request_id] = int(hit[1])
            self.blocks_read += self._kv_cache.blocks_at_most(known)
        return known
