"""How much of each request's prefix the KV cache holds.

Blocks are followed where vLLM caches and evicts them, in its block pool. A block is owned by the
request that computed it first, and its eviction is reported for that request.

Cost: a dictionary entry per cached block, and one look-up per eviction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_sched.engine.journal.known_requests import KnownRequest, KnownRequests


class CacheChanges(NamedTuple):
    cleared: bool
    evicted: list[int]  # number, first and last token, and so on
    resident: list[int]  # number, tokens, and so on


class ResidentPrefixes:
    def __init__(
        self, pool: BlockPool, group: int, block_tokens: int, known: KnownRequests
    ) -> None:
        self.cleared = False
        self._pool = pool
        self._group = group
        self._block_tokens = block_tokens
        self._known = known
        self._owners: dict[Any, tuple[KnownRequest, int]] = {}  # with the tokens before the block
        self._removed: list[Any] = []  # hashes, some of which other blocks may still have
        self._grown: dict[KnownRequest, None] = {}
        self._error: Exception | None = None
        self._follow()

    def _follow(self) -> None:
        self._pool.__class__ = FollowedBlockPool
        self._pool.prefixes = self
        blocks = self._pool.cached_block_hash_to_block
        blocks.__class__ = FollowedBlockMap
        blocks.removed = self._removed

    def fail(self, error: Exception) -> None:
        """Follow no further; the next `pop_changes` raises the error."""
        self._error = error
        self._pool.__class__ = BlockPool
        self._pool.cached_block_hash_to_block.__class__ = BlockHashToBlockMap

    def record_reuse(self, known: KnownRequest, tokens: int) -> None:
        """Note the cached prefix with which a request starts."""
        if tokens > known.resident:
            known.resident = tokens
            self._grown[known] = None

    def record_stored(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,  # noqa: ARG002
        kv_cache_group_id: int,
        *_: Any,
        **__: Any,
    ) -> None:
        """Note the blocks that are cached now, with the parameters of `cache_full_blocks`."""
        first, last = num_cached_blocks, num_full_blocks
        known = self._known.running.get(request.request_id)
        if known is None or kv_cache_group_id != self._group or first >= last:
            return
        owners, block_tokens = self._owners, self._block_tokens
        if first * block_tokens != known.stored:  # its first blocks, or those after a preemption
            known.shares = []
            if first and (shared := owners.get(blocks[first - 1].block_hash)) is not None:
                known.add_share(shared[0], first * block_tokens)
        for number in range(first, last):
            block_hash = blocks[number].block_hash
            if block_hash is None:
                continue
            if (shared := owners.get(block_hash)) is None:
                owners[block_hash] = known, number * block_tokens
                known.owned_blocks += 1
            else:
                known.add_share(shared[0], (number + 1) * block_tokens)
        known.stored = last * block_tokens
        known.resident = last * block_tokens
        self._grown[known] = None

    def reset(self) -> None:
        """Note that the cache is empty."""
        self._removed.clear()
        self._follow()
        owners = {known for known, _ in self._owners.values()}
        self._owners.clear()
        self._grown.clear()
        for known in self._known.all():
            known.resident = known.stored = known.owned_blocks = 0
        for known in owners:
            self._known.release_if_unneeded(known)
        self.cleared = True

    def pop_changes(self) -> CacheChanges:
        if self._error is not None:
            raise self._error
        evicted = self._pop_evictions() if self._removed else []
        resident = [value for known in self._grown for value in (known.number, known.resident)]
        self._grown.clear()
        cleared, self.cleared = self.cleared, False
        return CacheChanges(cleared, evicted, resident)

    def _pop_evictions(self) -> list[int]:
        cached = self._pool.cached_block_hash_to_block
        starts: defaultdict[KnownRequest, list[int]] = defaultdict(list)
        for block_hash in self._removed:
            if cached.get_one_block(block_hash) is not None:
                continue
            if (owner := self._owners.pop(block_hash, None)) is not None:
                starts[owner[0]].append(owner[1])
        self._removed.clear()
        evicted = []
        for known, tokens in starts.items():
            known.owned_blocks -= len(tokens)
            known.resident = min(known.resident, *tokens)
            self._known.release_if_unneeded(known)
            for start, end in _ranges(sorted(tokens), self._block_tokens):
                evicted += [known.number, start, end]
        return evicted


def _ranges(starts: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Join neighbouring blocks."""
    begin = end = starts[0]
    for start in starts:
        if start != end:
            yield begin, end
            begin = start
        end = start + length
    yield begin, end


class FollowedBlockMap(BlockHashToBlockMap):
    """Notes each hash that vLLM removes."""

    removed: list[Any]

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None:
            self.removed.append(key)
        return block


class FollowedBlockPool(BlockPool):
    """Tells `ResidentPrefixes` what vLLM caches."""

    prefixes: ResidentPrefixes

    def cache_full_blocks(self, *args: Any, **kwargs: Any) -> None:
        super().cache_full_blocks(*args, **kwargs)
        try:
            self.prefixes.record_stored(*args, **kwargs)
        except Exception as error:
            self.prefixes.fail(error)

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        if done:
            self.prefixes.reset()
        return done
