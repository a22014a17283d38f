"""Prefix tree of the requests on one worker.

Chained hashes allow binary search for the depth at which two prompts diverge.

Cost: a look-up per node, seven comparisons for the last one. Memory: two nodes per request.
"""

from __future__ import annotations

from proxy.core.learned.prefix_index import COVERED


class PrefixNode:
    __slots__ = ("above", "begin", "below", "blocks", "end", "holders", "tokens")

    def __init__(
        self, above: PrefixNode | None, blocks: tuple[int, ...], begin: int, end: int, tokens: int
    ) -> None:
        self.above = above  # None: root
        self.blocks, self.begin, self.end = blocks, begin, end  # a part of a whole prompt
        self.tokens = tokens
        self.holders = 1  # requests
        self.below: dict[int, PrefixNode] = {}  # by first block

    def split(self, above: PrefixNode, at: int) -> PrefixNode:
        """Split off and return the blocks before `at`."""
        begin, tokens = self.begin, self.tokens_before(at)
        front = PrefixNode(above, self.blocks, begin, at, tokens)
        front.holders = self.holders
        front.below[self.blocks[at]] = self
        above.below[self.blocks[begin]] = front
        self.above, self.begin = front, at
        self.tokens -= tokens
        return front

    def tokens_before(self, at: int) -> int:
        begin = COVERED[self.begin]
        return self.tokens * (COVERED[at] - begin) // (COVERED[self.end] - begin)


class PrefixTree:
    __slots__ = ("_root", "saved", "tokens")

    def __init__(self) -> None:
        self._root = PrefixNode(above=None, blocks=(), begin=0, end=0, tokens=0)
        self.tokens = 0
        self.saved = 0  # saved by sharing

    def add_request(self, blocks: tuple[int, ...], per_byte: float) -> tuple[PrefixNode, int]:
        """Add a request; return its last node and the tokens held before."""
        node, depth, last, shared = self._root, 0, len(blocks), 0
        while depth < last:
            below = node.below.get(blocks[depth])
            if below is None:
                tokens = int(COVERED[last] * per_byte) - int(COVERED[depth] * per_byte)
                below = node.below[blocks[depth]] = PrefixNode(node, blocks, depth, last, tokens)
                self.tokens += tokens
                self.saved += shared
                return below, shared
            end = below.end
            if end > last or below.blocks[end - 1] != blocks[end - 1]:
                at = _common_length(below.blocks, blocks, depth + 1, min(end, last))
                below = below.split(node, at)
            below.holders += 1
            shared += below.tokens
            node, depth = below, below.end
        self.saved += shared
        return node, shared

    def shared_tokens(self, blocks: tuple[int, ...]) -> int:
        """Return the held tokens of a prefix."""
        node, depth, last, shared = self._root, 0, len(blocks), 0
        while depth < last and (below := node.below.get(blocks[depth])) is not None:
            end = below.end
            if end > last or below.blocks[end - 1] != blocks[end - 1]:
                return shared + below.tokens_before(
                    _common_length(below.blocks, blocks, depth + 1, min(end, last))
                )
            shared += below.tokens
            node, depth = below, end
        return shared

    def release(self, node: PrefixNode) -> None:
        while (above := node.above) is not None:
            node.holders -= 1
            if node.holders:
                self.saved -= node.tokens
            else:
                self.tokens -= node.tokens
                del above.below[node.blocks[node.begin]]
            node = above


def _common_length(first: tuple[int, ...], other: tuple[int, ...], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if first[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
