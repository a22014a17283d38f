"""The KV blocks that a request needs.

A model with sliding-window attention or Mamba layers has several groups of layers that share one
pool of blocks. A request takes blocks in each group: for all of its tokens in a full-attention
group, at most for the window in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class KvGroup(NamedTuple):
    """Layers whose KV cache is allocated together."""

    block: int  # tokens per block
    most: int  # maximum blocks per request
    spare: int = 0  # blocks per request in addition to those for its tokens


@dataclass(frozen=True)
class KvCache:
    """The pool of blocks and the groups that share it."""

    blocks: int
    groups: Sequence[KvGroup]

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks of a request with this many tokens, in all groups."""
        return sum([min(-(-tokens // g.block) + g.spare, g.most) for g in self.groups])

    def blocks_at_most(self, tokens: int) -> int:
        """Return an upper bound of the blocks that this many prefill tokens fill in a step."""
        return sum([tokens // g.block for g in self.groups])
