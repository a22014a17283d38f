"""The KV cache that a worker's requests take together.

Idea: an engine stores a common prefix once, so the prefix is charged once. Hashes of body blocks
stand for token blocks. The decode leg of a hand-over shares from its first token on.

The worker's metrics page corrects the charges. Without a queue, the page plus the output to come
may be less than the charge: the rest is `kv_overcharged`. With a queue and a full cache, waiting
requests count like running ones. A higher sum means less sharing, which `kv_unshared` learns. Usage
beyond the charge is `kv_uncharged`.

Cost: that of `PrefixTree`. Prompts under 2 KB share nothing.

How it fails: blocks are coarse further into a prompt. Several processes each charge a common block
until the next page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.learned.prefix_index import COVERED

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.specs import Gauges
    from proxy.core.model.types import RequestInfo

KV_FULL = 0.95  # full: new requests wait
SHARING_LEARNING_RATE = 0.5  # of `kv_unshared`
MIN_SHARED_BLOCKS = 16
MAX_PAGE_AGE_S = 5.0


def charge(lease: Lease, now: float, *, shares_prefix: bool = True) -> None:
    """Charge a lease; `shares_prefix`: what other requests have of it is not charged again."""
    worker = lease.worker
    before = worker.kv_tokens
    worker.kv_tokens += lease.kv_tokens
    if shares_prefix:
        _share_prefix(lease)
    lease.kv_coming = worker.kv_tokens - before
    worker.kv_coming += lease.kv_coming
    if worker.kv_overcharged:
        gauges = worker.gauges
        if gauges is None or now - gauges.at > MAX_PAGE_AGE_S:
            worker.kv_overcharged = 0


def mark_prompt_cached(lease: Lease) -> None:
    lease.worker.kv_coming -= lease.kv_coming
    lease.kv_coming = 0
    if lease.prefill is not None and lease.holds is None:
        _share_prefix(lease)


def release(lease: Lease) -> None:
    worker = lease.worker
    worker.kv_tokens -= lease.kv_tokens
    worker.kv_coming -= lease.kv_coming
    lease.kv_tokens = lease.kv_coming = 0
    if lease.holds is not None:
        prefixes = worker.running_prefixes
        before = prefixes.tokens
        prefixes.release(lease.holds)
        worker.kv_tokens -= before - prefixes.tokens
        lease.holds = None
        # Without sharing, the rest takes no more than its own size.
        worker.kv_overcharged = max(worker.kv_overcharged, -prefixes.saved)


def uncharged_tokens(worker: Worker, now: float) -> int:
    """Return the tokens in the cache beyond the charges."""
    gauges = worker.gauges
    return worker.kv_uncharged if gauges is not None and now - gauges.at <= MAX_PAGE_AGE_S else 0


def shared_tokens(worker: Worker, info: RequestInfo) -> int:
    """Estimate the prompt tokens that other requests hold in the cache."""
    prefix = info.prefix
    if len(prefix) < MIN_SHARED_BLOCKS:
        return 0
    shared = worker.running_prefixes.shared_tokens(prefix)
    return shared - int(shared * max(worker.pace.evicted_share, worker.kv_unshared))


def _share_prefix(lease: Lease) -> None:
    info, worker = lease.info, lease.worker
    prefix, prefixes = info.prefix, worker.running_prefixes
    if len(prefix) < MIN_SHARED_BLOCKS or not worker.kv_capacity:
        return
    per_byte = info.prompt_tokens / info.prefix_bytes
    before = prefixes.tokens
    lease.holds, shared = prefixes.add_request(prefix, per_byte)
    again = int(shared * max(worker.pace.evicted_share, worker.kv_unshared))
    alone = again - int(COVERED[len(prefix)] * per_byte)
    lease.kv_tokens += alone
    worker.kv_tokens += alone + prefixes.tokens - before


def learn_from_page(worker: Worker, gauges: Gauges, queued: int) -> None:
    """Learn from a page; `queued`: requests waiting for room."""
    worker.kv_overcharged = worker.kv_uncharged = 0
    capacity = worker.kv_capacity
    if not capacity or not gauges.kv_usage:
        return
    charged, inside = worker.kv_tokens, gauges.kv_usage * capacity
    saved = worker.running_prefixes.saved
    if not queued:
        estimate = inside + worker.decode_tokens + worker.kv_coming
        worker.kv_overcharged = max(charged - int(estimate), 0)
    elif gauges.kv_usage > KV_FULL:
        requests = max(gauges.running + gauges.waiting, 1)
        with_queue = inside * (1.0 + queued / max(gauges.running, 1))
        estimate = with_queue * min(worker.sequences / requests, 1.0)
        max_estimate = charged + saved * (1.0 - max(worker.pace.evicted_share, worker.kv_unshared))
        worker.kv_overcharged = min(charged - int(min(estimate, max_estimate)), 0)
    worker.kv_uncharged = max(int(inside) - charged + worker.kv_overcharged, 0)
    if saved:
        apart = worker.kv_unshared - SHARING_LEARNING_RATE * worker.kv_overcharged / saved
        worker.kv_unshared = max(apart, 0.0)
