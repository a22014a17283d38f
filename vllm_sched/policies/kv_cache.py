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

    block: int  # tokens per block
    most: int  # maximum blocks per request
    spare: int = 0  # additional blocks per request


@dataclass(frozen=True)
class KvCache:
    """The pool of blocks and the groups that share it."""

    blocks: int
    groups: Sequence[KvGroup]

    def blocks_of(self, tokens: int) -> int:
        return sum([min(-(-tokens // g.block) + g.spare, g.most) for g in self.groups])

    def blocks_at_most(self, tokens: int) -> int:
        """Return an upper bound of the blocks that a step's prefill tokens fill."""
        return sum([tokens // g.block for g in self.groups])
