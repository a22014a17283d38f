"""What the requests on a worker begin with: a tree in which each beginning stands once.

A stem is as many blocks as the same requests go through together; where the first goes another way,
or ends, it is split. Each hash of a chain stands for all blocks up to its own (`prefix`), so how
far two prompts are alike is found by halving, and a prompt that nobody shares is one stem, however
long it is.

Cost: a look-up for each stem, and for the last one of those shared seven comparisons. Memory: of
each request in flight two stems at most.
"""

from __future__ import annotations

from proxy.core.learned.prefix_index import COVERED


class PrefixNode:
    """Blocks that the same requests go through."""

    __slots__ = ("above", "begin", "below", "blocks", "end", "holders", "tokens")

    def __init__(
        self, above: PrefixNode | None, blocks: tuple[int, ...], begin: int, end: int, tokens: int
    ) -> None:
        self.above = above  # None: this is the root
        self.blocks, self.begin, self.end = blocks, begin, end  # of a whole prompt, these
        self.tokens = tokens
        self.holders = 1  # requests
        self.below: dict[int, PrefixNode] = {}  # by their first block

    def split(self, above: PrefixNode, at: int) -> PrefixNode:
        """Cut off what is in front of a block; return that."""
        begin, tokens = self.begin, self.share(at)
        front = PrefixNode(above, self.blocks, begin, at, tokens)
        front.holders = self.holders
        front.below[self.blocks[at]] = self
        above.below[self.blocks[begin]] = front
        self.above, self.begin = front, at
        self.tokens -= tokens
        return front

    def share(self, at: int) -> int:
        """Say how many of its tokens are in front of a block."""
        begin = COVERED[self.begin]
        return self.tokens * (COVERED[at] - begin) // (COVERED[self.end] - begin)


class PrefixTree:
    """The beginnings of one worker's requests."""

    __slots__ = ("_root", "saved", "tokens")

    def __init__(self) -> None:
        self._root = PrefixNode(None, (), 0, 0, 0)
        self.tokens = 0  # of all of them, each counted once
        self.saved = 0  # that they would take besides, if each request had its own

    def hold(self, blocks: tuple[int, ...], per_byte: float) -> tuple[PrefixNode, int]:
        """Count one more that begins so; return where it ends, and how many tokens others hold."""
        stem, depth, last, found = self._root, 0, len(blocks), 0
        while depth < last:
            below = stem.below.get(blocks[depth])
            if below is None:
                tokens = int(COVERED[last] * per_byte) - int(COVERED[depth] * per_byte)
                below = stem.below[blocks[depth]] = PrefixNode(stem, blocks, depth, last, tokens)
                self.tokens += tokens
                self.saved += found
                return below, found
            end = below.end
            if end > last or below.blocks[end - 1] != blocks[end - 1]:
                at = _alike(below.blocks, blocks, depth + 1, min(end, last))
                below = below.split(stem, at)
            below.holders += 1
            found += below.tokens
            stem, depth = below, below.end
        self.saved += found
        return stem, found

    def shared(self, blocks: tuple[int, ...]) -> int:
        """Say how many tokens of one that begins so are held already."""
        stem, depth, last, found = self._root, 0, len(blocks), 0
        while depth < last and (below := stem.below.get(blocks[depth])) is not None:
            end = below.end
            if end > last or below.blocks[end - 1] != blocks[end - 1]:
                return found + below.share(_alike(below.blocks, blocks, depth + 1, min(end, last)))
            found += below.tokens
            stem, depth = below, end
        return found

    def let_go(self, stem: PrefixNode) -> None:
        """Count one less that ends there."""
        while (above := stem.above) is not None:
            stem.holders -= 1
            if stem.holders:
                self.saved -= stem.tokens
            else:
                self.tokens -= stem.tokens
                del above.below[stem.blocks[stem.begin]]
            stem = above


def _alike(one: tuple[int, ...], other: tuple[int, ...], low: int, high: int) -> int:
    """Return how many blocks two chains share, at least `low` and at most `high`."""
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
