"""Chunks of prompts in hybrid models, which end at block boundaries.

With `mamba_cache_mode=align` chunks end where vLLM stores Mamba state. A chunk is rounded up if a
policy grants less, and its request gets no chunk until later grants cover the debt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm.v1.request import Request


class BlockChunk(NamedTuple):
    tokens: int
    unused: int  # of the grant


class BlockChunks:
    def __init__(self, block_tokens: int, align: Callable[[Request, int, int], int]) -> None:
        self.block_tokens = block_tokens
        # vLLM's: shortens a chunk to a boundary, or to 0.
        self._align = align
        self._debts: dict[Request, int] = {}  # tokens computed beyond the grants

    def tokens_to_boundary(self, request: Request, computed: int) -> int:
        """Return the least chunk: to the end of a block, or of the prompt."""
        return int(
            min(request.num_tokens - computed, self.block_tokens - computed % self.block_tokens)
        )

    def chunk(
        self,
        request: Request,
        computed: int,
        granted: int,
        *,
        max_tokens: int,
        room: int,
        may_skip: Callable[[], bool],
    ) -> BlockChunk:
        """Return the chunk for a grant.

        `max_tokens` is vLLM's limit, `room` that of a chunk that is rounded up. A request in debt
        gets a chunk unless the step `may_skip` it.
        """
        uncached = computed - request.num_computed_tokens
        chunk = granted if granted == max_tokens else self._align(request, granted, uncached)
        debt = self._debts.get(request, 0)
        if chunk:
            # The tokens beyond the last boundary pay off the debt.
            paid = min(granted - chunk, debt)
            debt -= paid
        else:
            # No boundary is within the grant, so all of it pays.
            paid, debt = granted, debt - granted
            min_chunk = min(self.tokens_to_boundary(request, computed), max_tokens)
            if min_chunk <= room and (debt < 0 or not may_skip()):
                chunk = self._align(request, min_chunk, uncached)
                debt += chunk
        if debt > 0 and computed + chunk < request.num_tokens:
            self._debts[request] = min(debt, self.block_tokens)
        else:
            self.forget(request)
        return BlockChunk(chunk, max(granted - chunk - paid, 0))

    def forget(self, request: Request) -> None:
        self._debts.pop(request, None)
