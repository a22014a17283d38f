"""What the requests on a worker take of its KV cache, together.

An engine keeps a prompt's blocks once, however many of the requests that it runs begin with them: a
hundred agents with one long system prompt take little more than one of them. What is cached and
held by nobody takes nothing, until somebody comes who begins with it.

Idea: blocks of bodies stand for those of tokens, as in `prefix`. Per worker it is counted how many
requests in flight begin with each: a block is charged once, for as long as anybody holds it, and
the rest of a request to itself. Of what is shared, as much is charged again as was found `missing`.
The decode half of a hand-over shares from its first token on: until then its blocks are on the way.

All this is belief, and the worker's own page decides. While none wait there, it holds what the page
says, what is still to be written, and what has not shown a first token yet; if that is less than
what is charged, so much is spare. While some wait and its cache is full, each of those is taken to
need as much as one that runs: if that is more than what is charged, what was thought to be shared
is not. So it is learnt what part of it each has for itself all the same.

Cost: of a prompt of 100 KB thirty look-ups when it is sent, and as many when it ends; none where a
worker does not tell how large its cache is. How it fails: blocks are coarse further in, and prompts
of less than 2 KB share none; of several processes each charges a block that all of them hold, until
the next page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.prefix import COVERED

if TYPE_CHECKING:
    from proxy.core.types import Gauges, Lease
    from proxy.core.worker import Worker

KV_FULL = 0.95  # of a KV cache: beyond it a request would wait for room
HASTE = 0.5  # of what a page says of how much is shared, so much is believed from then on
FEW = 4  # blocks: of a prompt with fewer it is not worth knowing
HEEDED_S = 5.0  # after which a page says nothing of now
# Not every block is looked up: the further in, the fewer.
FIRST = 8
SOME = slice(FIRST), slice(11, 32, 4), slice(33, 56, 2), slice(56, None)
ENDS = tuple(end for part in SOME for end in COVERED[1:][part])


def some(prefix: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the blocks to look up."""
    if len(prefix) <= FIRST:
        return prefix
    first, second, third, rest = SOME
    return prefix[first] + prefix[second] + prefix[third] + prefix[rest]


class Blocks:
    """The blocks that one worker's requests begin with."""

    __slots__ = ("_held", "saved", "tokens")

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}  # by how many, and of how many tokens
        self.tokens = 0  # of all of them, each counted once
        self.saved = 0  # that they would take besides, if each request had its own

    def hold(self, blocks: tuple[int, ...], per_byte: float) -> int:
        """Count one more that begins so; return how many tokens of it others hold."""
        held = self._held
        found = brought = before = 0
        for block, covered in zip(blocks, ENDS, strict=False):
            end = int(covered * per_byte)
            entry = held.get(block)
            if entry is None:
                held[block] = [1, end - before]
                brought += end - before
            else:
                entry[0] += 1
                found += entry[1]
            before = end
        self.tokens += brought
        self.saved += found
        return found

    def let_go(self, blocks: tuple[int, ...]) -> None:
        """Count one less."""
        held = self._held
        for block in blocks:
            entry = held[block]
            if entry[0] > 1:
                entry[0] -= 1
                self.saved -= entry[1]
            else:
                del held[block]
                self.tokens -= entry[1]


def take(lease: Lease, now: float, *, together: bool = True) -> None:
    """Charge what a lease says to its worker's cache; `together`: with what others hold."""
    worker = lease.worker
    before = worker.kv_tokens
    worker.kv_tokens += lease.kv_tokens
    if together:
        _join(lease)
    lease.kv_coming = worker.kv_tokens - before
    worker.kv_coming += lease.kv_coming
    if worker.kv_spare:
        gauges = worker.gauges
        if gauges is None or now - gauges.at > HEEDED_S:
            worker.kv_spare = 0


def came(lease: Lease) -> None:
    """Note that a lease's prompt is in the cache."""
    lease.worker.kv_coming -= lease.kv_coming
    lease.kv_coming = 0
    if not lease.holds:
        _join(lease)


def give(lease: Lease) -> None:
    """Give back all that was charged."""
    worker = lease.worker
    worker.kv_tokens -= lease.kv_tokens
    worker.kv_coming -= lease.kv_coming
    lease.kv_tokens = lease.kv_coming = 0
    if lease.holds:
        blocks = worker.blocks
        before = blocks.tokens
        blocks.let_go(lease.holds)
        worker.kv_tokens -= before - blocks.tokens
        lease.holds = ()


def _join(lease: Lease) -> None:
    """Have a lease's blocks charged with those of others, where they are the same."""
    ask, worker = lease.ask, lease.worker
    if len(ask.prefix) < FEW or not worker.kv_capacity:
        return
    lease.holds, blocks = some(ask.prefix), worker.blocks
    per_byte = ask.prompt_tokens / ask.prefix_bytes
    before = blocks.tokens
    again = int(blocks.hold(lease.holds, per_byte) * max(worker.pace.missing, worker.kv_apart))
    alone = again - int(ENDS[len(lease.holds) - 1] * per_byte)
    lease.kv_tokens += alone
    worker.kv_tokens += alone + blocks.tokens - before


def learn(worker: Worker, gauges: Gauges, queued: int) -> None:
    """Take what a page says of the cache, and how many wait for room there."""
    worker.kv_spare = 0
    capacity = worker.kv_capacity
    if not capacity or not gauges.kv_usage or not worker.requests:
        return
    charged, inside = worker.kv_tokens, gauges.kv_usage * capacity
    saved = worker.blocks.saved
    if not queued:
        told = inside + worker.decode_tokens + worker.kv_coming
        worker.kv_spare = max(charged - int(told), 0)
    elif gauges.kv_usage > KV_FULL:
        there = max(gauges.running + gauges.waiting, 1)
        told = inside * (1.0 + queued / max(gauges.running, 1)) * min(worker.sequences / there, 1.0)
        most = charged + saved * (1.0 - max(worker.pace.missing, worker.kv_apart))
        worker.kv_spare = min(charged - int(min(told, most)), 0)
    if saved:
        apart = worker.kv_apart - HASTE * worker.kv_spare / saved
        worker.kv_apart = min(max(apart, 0.0), 1.0)
