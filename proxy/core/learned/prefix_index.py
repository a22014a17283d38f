"""Index of prompt prefixes that workers may have cached.

Idea: prompts are cut into blocks of 128 bytes to 4 KB, about 1,024 tokens; 64 KB beyond 4 MB. Each
hash is seeded with the previous one, so equal hashes mean equal prefixes.

A block is resident if the worker's journal says so, and expected on the worker that got it: in a
`RadixTree`, or for workers with a journal until the request has ended. Tokens of resident blocks
come from the journal as well.

Memory: that of `RadixTree`, and as many resident hashes as caches hold. Expected ones beside them
are in two generations, at most 16 MB; a full new one replaces the old one.

Cost: 0.1 ms to hash a body of 1 MB. With journals two or three look-ups per block.

How it fails: whitespace matters. Without a journal evictions are unseen; their share is
`LatencyModel.evicted_share`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from proxy.core.learned.radix_tree import RadixTree

MAX_GENERATION_HASHES = 32_768
# From a list: mypyc would write down each item of a longer tuple.
BLOCKS = tuple([128] * 32 + [256] * 48 + [2048] * 24 + [4096] * 1008 + [65_536] * 960)
ENDS = tuple(accumulate(BLOCKS))
MAX_COPIED_BLOCKS = 96
COVERED = (0, *ENDS)  # bytes per number of blocks
Matches = list[tuple[int, int]]  # block counts, and worker masks


class PrefixIndex:
    def __init__(self) -> None:
        self._sent = RadixTree()
        self._followed = 0  # workers with a journal: not in the tree
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._resident: dict[int, int] = {}
        self._tokens: dict[int, int] = {}  # up to the end of a resident block
        # Cached tokens by the last common block and worker: where prompts went apart, and of
        # prompts that begin with a whole earlier one.
        self._forks: dict[int, dict[int, int]] = {}
        self._ends: dict[int, dict[int, int]] = {}
        self._gone = 0  # stale bits of removed workers
        self._seeds: dict[str, int] = {}
        self._ending: list[tuple[tuple[int, ...], int]] = []
        self._ended: list[tuple[tuple[int, ...], int]] = []  # before the last call
        # Reports records to other processes.
        self.report_prefix: Callable[[tuple[int, ...], int], None] | None = None
        # Records prompts of other processes that begin with a block.
        self.record_remote_prompts: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return self._sent.hashes + len(self._new) + len(self._old)

    def hashes(self, model: str, body: bytes, start: int = 0, end: int = -1) -> tuple[int, ...]:
        """Hash the whole blocks of a prompt."""
        blocks = bisect_right(ENDS, (len(body) if end < 0 else end) - start)
        if not blocks:
            return ()
        seed = self._seeds.get(model)
        if seed is None:
            seed = xxh3_64_intdigest(model.encode())
            if len(self._seeds) < 1024:
                self._seeds[model] = seed
        if blocks == 1:
            return (xxh3_64_intdigest(body[start : start + BLOCKS[0]], seed),)
        # Copying a little is cheaper.
        view = body if blocks < MAX_COPIED_BLOCKS else memoryview(body)
        chain = []
        for size in BLOCKS[:blocks]:
            seed = xxh3_64_intdigest(view[start : start + size], seed)
            start += size
            chain.append(seed)
        return tuple(chain)

    def matches(self, hashes: tuple[int, ...]) -> Matches:
        """Return the deepest matches first."""
        if hashes and self.record_remote_prompts is not None:
            self.record_remote_prompts(hashes[0])
        sent = self._sent.matches(hashes, self._followed)
        if not (self._resident or self._new or self._old):
            return sent
        reported = self._reported(hashes)
        if not sent or not reported:
            return sent or reported
        by_depth = dict(sent)
        for depth, holders in reported:
            by_depth[depth] = by_depth.get(depth, 0) | holders
        return sorted(by_depth.items(), reverse=True)

    def _reported(self, hashes: tuple[int, ...]) -> Matches:
        reported: Matches = []
        new, old, resident = self._new, self._old, self._resident
        sound, alive = ~self._gone, -1
        for depth, block in enumerate(hashes):
            holders = sound & (new.get(block) or old.get(block, 0))
            if resident:
                holders |= resident.get(block, 0)
            holders &= alive
            if holders != alive:
                if depth:
                    reported.append((depth, alive))
                alive = holders
                if not alive:
                    break
        if alive and hashes:
            reported.append((len(hashes), alive))
        reported.reverse()
        return reported

    def reported_prefix(self, hashes: tuple[int, ...]) -> tuple[int, int]:
        """Return how many first blocks an engine has reported, and the tokens in them."""
        tokens = self._tokens
        low, high = 0, len(hashes) if tokens else 0
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in tokens:
                low = middle
            else:
                high = middle - 1
        if not low:
            return 0, 0
        last, forks = hashes[low - 1], self._forks
        return low, max(tokens[last], max(forks[last].values()) if last in forks else 0)

    def matched_tokens(
        self,
        matches: Matches,
        hashes: tuple[int, ...],
        prompt_bytes: int,
        bytes_before: int,
        prompt_tokens: int,
    ) -> Matches:
        blocks, tokens = self.reported_prefix(hashes)
        begin = COVERED[blocks] if blocks else -bytes_before
        per_byte = max(prompt_tokens - tokens, 0) / max(prompt_bytes - begin, 1)
        in_tokens: Matches = []
        for depth, workers in matches:
            last = hashes[depth - 1]
            held = self._tokens.get(last)
            if held is None:
                held = tokens + int((COVERED[depth] - begin) * per_byte)
            if last in self._forks or last in self._ends:
                in_tokens += self._matches_after(workers, last, held, prompt_tokens)
            else:
                in_tokens.append((max(min(held, prompt_tokens), 0), workers))
        return in_tokens

    def _matches_after(self, workers: int, last: int, held: int, prompt_tokens: int) -> Matches:
        """Return the tokens by what each worker found after the last block."""
        forks, ends = self._forks.get(last, {}), self._ends.get(last, {})
        masks: dict[int, int] = {}
        for worker in {**forks, **ends}:
            if bit := workers & 1 << worker:
                tokens = min(forks.get(worker) or ends.get(worker, 0), prompt_tokens)
                masks[tokens] = masks.get(tokens, 0) | bit
                workers ^= bit
        if workers:
            if forks:  # the texts are the same
                held = next(reversed(forks.values()))
            tokens = max(min(held, prompt_tokens), 0)
            masks[tokens] = masks.get(tokens, 0) | workers
        return [*masks.items()]

    def record(self, hashes: tuple[int, ...], worker: int) -> None:
        if self._followed >> worker & 1:
            self.expect(hashes, worker)
        elif not self._sent.record(hashes, worker):
            return
        if self.report_prefix is not None:
            self.report_prefix(hashes, worker)

    def follow(self, worker: int) -> None:
        """Expect blocks on a worker until its journal reports them."""
        if not self._followed >> worker & 1:
            self._sent.forget(worker)
        self._followed |= 1 << worker

    def unfollow(self, worker: int) -> None:
        self._followed &= ~(1 << worker)

    def expect(self, hashes: tuple[int, ...], worker: int) -> None:
        """Expect single blocks, which need not be a prefix."""
        new, old = self._new, self._old
        bit = 1 << worker
        if self._gone & bit:
            self._sweep()
        for block in hashes:
            holders = new.get(block)
            if holders is None:
                holders = old.get(block, 0)
            elif holders & bit:
                continue
            new[block] = holders | bit
        if len(new) > MAX_GENERATION_HASHES:
            self._old, self._new = new, {}

    def add_block(self, block: int, worker: int, tokens: int) -> None:
        """Note that a worker's cache holds a block, and about which token ends it, if not -1."""
        self._resident[block] = self._resident.get(block, 0) | 1 << worker
        if tokens >= 0:
            self._tokens.setdefault(block, tokens)

    def record_fork(self, block: int, worker: int, tokens: int) -> None:
        """Note the cached tokens of a prompt that goes apart from others in or after a block."""
        forks = self._forks.setdefault(block, {})
        forks.pop(worker, None)
        forks[worker] = tokens  # the newest is the last one
        _forget(self._ends, block, worker)

    def record_prompt_end(self, block: int, worker: int, tokens: int) -> None:
        """Note the cached tokens of a whole prompt and its response, by the last block."""
        if block in self._resident:
            self._ends.setdefault(block, {})[worker] = tokens

    def remove_block(self, block: int, worker: int) -> None:
        _clear(self._resident, block, 1 << worker)
        if block not in self._resident:
            self._tokens.pop(block, None)
        _forget(self._forks, block, worker)
        _forget(self._ends, block, worker)
        self.stop_expecting((block,), worker)

    def end_request(self, hashes: tuple[int, ...], worker: int) -> None:
        """Leave the blocks of a request to the worker's journal, which may be a moment behind."""
        self._ending.append((hashes, worker))

    def drop_ended(self) -> None:
        """Expect no longer what ended before the previous call."""
        for hashes, worker in self._ended:
            self.stop_expecting(hashes, worker)
        self._ended, self._ending = self._ending, []

    def stop_expecting(self, hashes: tuple[int, ...], worker: int) -> None:
        bit = 1 << worker
        for block in hashes:
            _clear(self._new, block, bit)
            _clear(self._old, block, bit)

    def forget(self, worker: int) -> None:
        """Expect nothing on a worker that was removed or restarted."""
        self._sent.forget(worker)
        self._gone |= 1 << worker  # swept later, many at once

    def _sweep(self) -> None:
        keep, self._gone = ~self._gone, 0
        for generation in (self._new, self._old):
            for block, holders in list(generation.items()):
                if left := holders & keep:
                    generation[block] = left
                else:
                    del generation[block]


def _clear(holders: dict[int, int], block: int, bit: int) -> None:
    bits = holders.get(block, 0)
    if bits == bit:
        del holders[block]
    elif bits & bit:
        holders[block] = bits ^ bit


def _forget(tokens: dict[int, dict[int, int]], block: int, worker: int) -> None:
    if (counted := tokens.get(block)) is not None:
        counted.pop(worker, None)
        if not counted:
            del tokens[block]


def workers_of_deepest(matches: Matches, limit: int) -> list[int]:
    holders = matches[0][1] if matches else 0
    named: list[int] = []
    while holders and len(named) < limit:
        lowest = holders & -holders
        named.append(lowest.bit_length() - 1)
        holders ^= lowest
    return named
