"""What the requests on a worker take of its KV cache, together.

An engine keeps a prompt's blocks once, however many of the requests that it runs begin with them: a
hundred agents with one long system prompt take little more than one of them. What is cached and
held by nobody takes nothing, until somebody comes who begins with it.

Idea: blocks of bodies stand for those of tokens, as in `prefix`. Per worker it is known what those
in flight begin with (`stems`): it is charged once, for as long as anybody holds it, and the rest of
a request to itself. Of what is shared, as much is charged again as was found `missing`. The decode
half of a hand-over shares from its first token on: until then its blocks are on the way.

All this is belief, and the worker's own page decides. While none wait there, it holds what the page
says, what is still to be written, and what has not shown a first token yet; if that is less than
what is charged, so much is spare. While some wait and its cache is full, each of those is taken to
need as much as one that runs: if that is more than what is charged, what was thought to be shared
is not. So it is learnt what part of it each has for itself all the same. What it holds beyond that,
whoever waits, is strangers', or of answers longer than was foreseen: so much less room is there for
a hand-over.

Cost: that of the stems, and nothing for prompts of less than 2 KB, which share none, nor where a
worker does not tell how large its cache is. How it fails: blocks are coarse further in, and of
several processes each charges a block that all of them hold, until the next page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.learned.prefix_index import COVERED

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.specs import Gauges
    from proxy.core.model.types import RequestInfo

KV_FULL = 0.95  # of a KV cache: beyond it a request would wait for room
HASTE = 0.5  # of what a page says of how much is shared, so much is believed from then on
FEW = 4  # blocks: of a prompt with fewer it is not worth knowing
HEEDED_S = 5.0  # after which a page says nothing of now


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
    if lease.prefill is not None and lease.holds is None:
        _join(lease)


def give(lease: Lease) -> None:
    """Give back all that was charged."""
    worker = lease.worker
    worker.kv_tokens -= lease.kv_tokens
    worker.kv_coming -= lease.kv_coming
    lease.kv_tokens = lease.kv_coming = 0
    if lease.holds is not None:
        stems = worker.stems
        before = stems.tokens
        stems.let_go(lease.holds)
        worker.kv_tokens -= before - stems.tokens
        lease.holds = None
        # Each of those that stay takes no more than it would alone, be there another page or not.
        worker.kv_spare = max(worker.kv_spare, -stems.saved)


def more(worker: Worker, now: float) -> int:
    """Say how many tokens a worker's cache holds beyond what is charged, by its last page.

    They are strangers', or of answers that are longer than was foreseen.
    """
    gauges = worker.gauges
    return worker.kv_more if gauges is not None and now - gauges.at <= HEEDED_S else 0


def shares(worker: Worker, ask: RequestInfo) -> int:
    """Reckon how many tokens of a prompt a worker's cache holds for others, and need not twice."""
    prefix = ask.prefix
    if len(prefix) < FEW:
        return 0
    found = worker.stems.shared(prefix)
    return found - int(found * max(worker.pace.missing, worker.kv_apart))


def _join(lease: Lease) -> None:
    """Have a lease's beginning charged with those of others, where they are the same."""
    ask, worker = lease.ask, lease.worker
    prefix, stems = ask.prefix, worker.stems
    if len(prefix) < FEW or not worker.kv_capacity:
        return
    per_byte = ask.prompt_tokens / ask.prefix_bytes
    before = stems.tokens
    lease.holds, found = stems.hold(prefix, per_byte)
    again = int(found * max(worker.pace.missing, worker.kv_apart))
    alone = again - int(COVERED[len(prefix)] * per_byte)
    lease.kv_tokens += alone
    worker.kv_tokens += alone + stems.tokens - before


def learn(worker: Worker, gauges: Gauges, queued: int) -> None:
    """Take what a page says of the cache, and how many wait for room there."""
    worker.kv_spare = worker.kv_more = 0
    capacity = worker.kv_capacity
    if not capacity or not gauges.kv_usage:
        return
    charged, inside = worker.kv_tokens, gauges.kv_usage * capacity
    saved = worker.stems.saved
    if not queued:
        told = inside + worker.decode_tokens + worker.kv_coming
        worker.kv_spare = max(charged - int(told), 0)
    elif gauges.kv_usage > KV_FULL:
        there = max(gauges.running + gauges.waiting, 1)
        told = inside * (1.0 + queued / max(gauges.running, 1)) * min(worker.sequences / there, 1.0)
        most = charged + saved * (1.0 - max(worker.pace.missing, worker.kv_apart))
        worker.kv_spare = min(charged - int(min(told, most)), 0)
    worker.kv_more = max(int(inside) - charged + worker.kv_spare, 0)
    if saved:
        apart = worker.kv_apart - HASTE * worker.kv_spare / saved
        worker.kv_apart = min(max(apart, 0.0), 1.0)
