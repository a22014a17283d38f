"""The KV blocks that a request needs.

Groups of layers share one pool of blocks. A request takes blocks in each group: for all tokens in a
full-attention group, at most for the window in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class KvGroup(NamedTuple):
    """Layers that share an allocation of KV blocks."""

    block_tokens: int
    max_blocks: int  # of a request
    spare_blocks: int = 0  # additional, of a request


@dataclass(frozen=True)
class KvCache:
    blocks: int
    groups: Sequence[KvGroup]

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a request with these tokens."""
        return sum(
            [min(-(-tokens // g.block_tokens) + g.spare_blocks, g.max_blocks) for g in self.groups]
        )

    def blocks_at_most(self, tokens: int) -> int:
        """Return an upper bound of the blocks that a step's prefill tokens fill."""
        return sum([tokens // g.block_tokens for g in self.groups])
