"""Which worker may still hold the beginning of a prompt in its cache.

Idea: a body's prompt part is cut into blocks at fixed places, small ones first and larger ones
further in, and each block's hash is seeded with the one before. Two prompts share as many hashes as
they share blocks. For each hash a bit mask says which workers were sent it; walking a chain and
and-ing masks gives every worker's match at once, however many workers there are.

Memory: two generations of `GENERATION` hashes; when the young one is full the old one goes, so what
is used stays and what is not is forgotten in time. An entry is about 105 bytes with few workers and
240 with a thousand: 7 to 16 MB in all, and never more. Cost: a hash and two look-ups per block, at
most 96 blocks (1.3 MB of prompt; a longer one is as good as unique by then). Who is gone is left
out at once, and taken out of all masks (10 ms) when a place of the gone is taken again: once for a
thousand.

How it fails: bytes are not tokens, so equal prompts written with other spaces do not match; a
worker that evicted a prefix is still believed to hold it, which is why it is learnt how much of
what should be cached is missing (`Pace.missing`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from xxhash import xxh3_64_intdigest

GENERATION = 32_768
BLOCKS = (512,) * 32 + (2048,) * 24 + (8192,) * 24 + (65_536,) * 16
ENDS = tuple(accumulate(BLOCKS))
FEW = 8
COVERED = (0, *ENDS)  # bytes that so many blocks stand for
Matches = list[tuple[int, int]]  # so many blocks, and a mask of the workers that hold at least them


class PrefixIndex:
    """Hashes of prompt blocks, and the workers that were sent them."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._gone = 0  # workers whose bits are still in them, and mean nothing
        self._seeds: dict[str, int] = {}
        # Where several processes serve: tells the others what is recorded here.
        self.others_record: Callable[[tuple[int, ...], int], None] | None = None

    def __len__(self) -> int:
        """Count the hashes held."""
        return len(self._young) + len(self._old)

    def hashes(self, model: str, body: bytes, start: int = 0) -> tuple[int, ...]:
        """Hash the whole blocks of a body from where its prompt starts."""
        blocks = bisect_right(ENDS, len(body) - start)
        if not blocks:
            return ()
        seed = self._seeds.get(model)
        if seed is None:
            seed = xxh3_64_intdigest(model.encode())
            if len(self._seeds) < 1024:
                self._seeds[model] = seed
        if blocks == 1:
            return (xxh3_64_intdigest(body[start : start + BLOCKS[0]], seed),)
        view = body if blocks < FEW else memoryview(body)  # to copy a little is cheaper
        chain = []
        for size in BLOCKS[:blocks]:
            seed = xxh3_64_intdigest(view[start : start + size], seed)
            start += size
            chain.append(seed)
        return tuple(chain)

    def matches(self, hashes: tuple[int, ...]) -> Matches:
        """Return how many leading blocks are held, and by whom: the deepest first."""
        found: Matches = []
        young, old = self._young, self._old
        alive = ~self._gone
        for depth, block in enumerate(hashes):
            holders = alive & (young.get(block) or old.get(block, 0))
            if holders != alive:
                if depth:
                    found.append((depth, alive))
                alive = holders
                if not alive:
                    break
        if alive and hashes:
            found.append((len(hashes), alive))
        found.reverse()
        return found

    def record(self, hashes: tuple[int, ...], worker: int) -> None:
        """Note that a worker was sent these blocks."""
        young, old = self._young, self._old
        bit = 1 << worker
        if self._gone & bit:
            self._sweep()
        if hashes and young.get(hashes[-1], 0) & bit:
            return  # and with it all that is in front of it
        for block in hashes:
            holders = young.get(block)
            if holders is None:
                holders = old.get(block, 0)
            elif holders & bit:
                continue
            young[block] = holders | bit
        if self.others_record is not None:
            self.others_record(hashes, worker)
        if len(young) > self._generation:
            self._old, self._young = young, {}

    def forget(self, worker: int) -> None:
        """Drop a worker from every block: it is gone, or has restarted with an empty cache."""
        self._gone |= 1 << worker  # many may be gone at a time: see `_sweep`

    def _sweep(self) -> None:
        """Take who is gone out of every block, before one of them is in any again."""
        keep, self._gone = ~self._gone, 0
        for generation in (self._young, self._old):
            for block, holders in list(generation.items()):
                if left := holders & keep:
                    generation[block] = left
                else:
                    del generation[block]


def deepest(matches: Matches, most: int) -> list[int]:
    """Name some of those that hold the most."""
    holders = matches[0][1] if matches else 0
    named: list[int] = []
    while holders and len(named) < most:
        lowest = holders & -holders
        named.append(lowest.bit_length() - 1)
        holders ^= lowest
    return named
