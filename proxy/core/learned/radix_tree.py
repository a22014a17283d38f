"""Radix tree of the prompts that were sent to workers.

Idea: a node has a part of a prompt as chained hashes, and a bit mask of workers. Prompts share the
nodes of their common prefix. Chained hashes allow binary search for the end of a match.

Cost: a look-up per node, ten comparisons for the last one. Memory: 8 bytes per hash and 0.4 KB per
node, at most 45 MB. Beyond, the leaf that was sent least recently is evicted.

How it fails: a node per fork and per change of the worker, so many of them evict other prompts.
"""

from __future__ import annotations

from array import array

MAX_HASHES = 4_194_304
MAX_NODES = 32_768  # to collect garbage or to forget a worker takes 5 ms


class RadixNode:
    __slots__ = ("above", "below", "hashes", "newer", "older", "workers")

    def __init__(self, above: RadixNode | None, hashes: array[int], workers: int) -> None:
        self.above = self if above is None else above
        self.hashes = hashes
        self.workers = workers  # bit mask; includes those of the nodes below
        self.below: dict[int, RadixNode] = {}  # by first hash
        self.older = self.newer = self


class RadixTree:
    def __init__(self, max_hashes: int = MAX_HASHES, max_nodes: int = MAX_NODES) -> None:
        self._max_hashes, self._max_nodes = max_hashes, max_nodes
        # Also the end of the list by age.
        self._root = RadixNode(above=None, hashes=array("Q"), workers=0)
        self._gone = 0  # stale bits of removed workers
        self.hashes = self.nodes = 0

    def matches(self, hashes: tuple[int, ...], hidden: int = 0) -> list[tuple[int, int]]:
        """Return the matched lengths with worker masks, deepest first, without `hidden` workers."""
        holders: list[tuple[int, int]] = []
        visible = ~(self._gone | hidden)
        node, depth, last = self._root, 0, len(hashes)
        while depth < last:
            below = node.below.get(hashes[depth])
            if below is None or not (workers := below.workers & visible):
                break
            part = below.hashes
            end = depth + len(part)
            whole = end <= last and part[-1] == hashes[end - 1]
            if not whole:
                end = depth + _common_length(part, hashes, depth)
            if holders and holders[-1][1] == workers:
                holders.pop()
            holders.append((end, workers))
            if not whole:
                break
            node, depth = below, end
        holders.reverse()
        return holders

    def record(self, hashes: tuple[int, ...], worker: int) -> bool:
        """Note that a worker got a prompt; return whether that is new."""
        bit = 1 << worker
        if self._gone & bit:
            self._sweep()
        node, depth, last, changed = self._root, 0, len(hashes), False
        while depth < last:
            below = node.below.get(hashes[depth])
            if below is None:
                node = self._append(node, array("Q", hashes[depth:]), bit)
                changed = True
                break
            part = below.hashes
            end = depth + len(part)
            if end > last or part[-1] != hashes[end - 1]:
                at = _common_length(part, hashes, depth)
                end = depth + at
                if end < last or not below.workers & bit:
                    below = self._split(below, at)
            if not below.workers & bit:
                below.workers |= bit
                changed = True
            node, depth = below, end
        while node is not self._root:  # so a node is newer than those below
            self._make_newest(node)
            node = node.above
        while self.hashes > self._max_hashes or self.nodes > self._max_nodes:
            self._remove(self._root.newer)
        return changed

    def forget(self, worker: int) -> None:
        self._gone |= 1 << worker  # swept later, many at once

    def _sweep(self) -> None:
        keep, self._gone = ~self._gone, 0
        node = self._root.newer
        while node is not self._root:
            newer = node.newer
            node.workers &= keep
            if not node.workers:
                self._remove(node)
            node = newer

    def _append(self, node: RadixNode, part: array[int], bit: int) -> RadixNode:
        self.hashes += len(part)
        if not node.below and node.workers == bit:  # a prompt that grew
            node.hashes.extend(part)
            return node
        self.nodes += 1
        added = RadixNode(node, part, bit)
        node.below[part[0]] = added
        return added

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Split off and return the hashes before `at`."""
        above, part = node.above, node.hashes
        front = RadixNode(above, part[:at], node.workers)
        above.below[part[0]] = front
        node.above, node.hashes = front, part[at:]
        front.below = {part[at]: node}
        self.nodes += 1
        return front

    def _make_newest(self, node: RadixNode) -> None:
        root = self._root
        node.older.newer, node.newer.older = node.newer, node.older
        node.older, node.newer = root.older, root
        root.older.newer = root.older = node

    def _remove(self, node: RadixNode) -> None:
        del node.above.below[node.hashes[0]]
        node.older.newer, node.newer.older = node.newer, node.older
        self.hashes -= len(node.hashes)
        self.nodes -= 1


def _common_length(part: array[int], hashes: tuple[int, ...], depth: int) -> int:
    """Return the common length of a node and of the prompt's rest, at least 1."""
    low, high = 1, min(len(part), len(hashes) - depth)
    while low < high:
        middle = (low + high) // 2
        if part[middle] == hashes[depth + middle]:
            low = middle + 1
        else:
            high = middle
    return low
