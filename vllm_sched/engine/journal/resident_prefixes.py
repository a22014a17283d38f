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

from vllm_sched.engine.journal.journal_requests import JournalRequest, JournalRequests


class CacheChanges(NamedTuple):
    cleared: bool
    evicted: list[int]  # number, first and last token, and so on
    resident: list[int]  # number, tokens, and so on


class ResidentPrefixes:
    def __init__(
        self, pool: BlockPool, group: int, block_tokens: int, requests: JournalRequests
    ) -> None:
        self.cleared = False
        self._pool = pool
        self._group = group
        self._block_tokens = block_tokens
        self._requests = requests
        self._owners: dict[Any, tuple[JournalRequest, int]] = {}  # with the tokens before the block
        self._removed_hashes: list[Any] = []  # other blocks may still have some of them
        self._grown_requests: dict[JournalRequest, None] = {}
        self._error: Exception | None = None
        self._follow()

    def _follow(self) -> None:
        self._pool.__class__ = FollowedBlockPool
        self._pool.prefixes = self
        blocks = self._pool.cached_block_hash_to_block
        blocks.__class__ = FollowedBlockMap
        blocks.removed_hashes = self._removed_hashes

    def fail(self, error: Exception) -> None:
        """Follow no further; the next `pop_changes` raises the error."""
        self._error = error
        self._pool.__class__ = BlockPool
        self._pool.cached_block_hash_to_block.__class__ = BlockHashToBlockMap

    def record_reuse(self, entry: JournalRequest, tokens: int) -> None:
        """Note the cached prefix with which a request starts."""
        if tokens > entry.resident:
            entry.resident = tokens
            self._grown_requests[entry] = None

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
        entry = self._requests.running.get(request.request_id)
        if entry is None or kv_cache_group_id != self._group or first >= last:
            return
        owners, block_tokens = self._owners, self._block_tokens
        if first * block_tokens != entry.stored:  # its first blocks, or those after a preemption
            entry.shares = []
            if first and (owner := owners.get(blocks[first - 1].block_hash)) is not None:
                entry.add_share(owner[0], first * block_tokens)
        for number in range(first, last):
            block_hash = blocks[number].block_hash
            if block_hash is None:
                continue
            if (owner := owners.get(block_hash)) is None:
                owners[block_hash] = entry, number * block_tokens
                entry.owned_blocks += 1
            else:
                entry.add_share(owner[0], (number + 1) * block_tokens)
        entry.stored = last * block_tokens
        entry.resident = last * block_tokens
        self._grown_requests[entry] = None

    def reset(self) -> None:
        """Note that the cache is empty."""
        self._removed_hashes.clear()
        self._follow()
        owners = {entry for entry, _ in self._owners.values()}
        self._owners.clear()
        self._grown_requests.clear()
        for entry in self._requests:
            entry.resident, entry.stored, entry.owned_blocks = 0, 0, 0
        for entry in owners:
            self._requests.release_if_unneeded(entry)
        self.cleared = True

    def pop_changes(self) -> CacheChanges:
        if self._error is not None:
            raise self._error
        evicted = self._pop_evictions() if self._removed_hashes else []
        resident: list[int] = []
        for entry in self._grown_requests:
            resident += entry.number, entry.resident
        self._grown_requests.clear()
        cleared, self.cleared = self.cleared, False
        return CacheChanges(cleared, evicted, resident)

    def _pop_evictions(self) -> list[int]:
        cached = self._pool.cached_block_hash_to_block
        starts: defaultdict[JournalRequest, list[int]] = defaultdict(list)
        for block_hash in self._removed_hashes:
            if cached.get_one_block(block_hash) is not None:
                continue
            if block_hash in self._owners:
                owner, start = self._owners.pop(block_hash)
                starts[owner].append(start)
        self._removed_hashes.clear()
        evicted = []
        for entry, tokens in starts.items():
            entry.owned_blocks -= len(tokens)
            entry.resident = min(entry.resident, *tokens)
            self._requests.release_if_unneeded(entry)
            for start, end in _ranges(sorted(tokens), self._block_tokens):
                evicted += [entry.number, start, end]
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

    removed_hashes: list[Any]

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None:
            self.removed_hashes.append(key)
        return block


class FollowedBlockPool(BlockPool):
    """Reports to `ResidentPrefixes` what vLLM caches."""

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
