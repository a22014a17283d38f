"""Blocks of KV cache that a request takes, in a cache whose groups of layers share one pool.

Models with full and sliding-window attention, or with Mamba layers, have several groups. A request
takes blocks in each: all of its tokens' in a full-attention group, at most its window's in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class KvGroup(NamedTuple):
    """Layers whose KV cache is allocated together."""

    block: int  # tokens of a block
    most: int  # blocks that one request holds at most
    spare: int = 0  # blocks that a request holds besides those of its tokens


@dataclass(frozen=True)
class KvCache:
    """The pool of blocks, and the groups that share it."""

    blocks: int
    groups: Sequence[KvGroup]

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that a request of so many tokens takes, in all groups."""
        return sum([min(-(-tokens // g.block) + g.spare, g.most) for g in self.groups])

    def blocks_at_most(self, tokens: int) -> int:
        """Return the blocks that a step with so many tokens of prefill takes at most."""
        return sum([tokens // g.block for g in self.groups])
