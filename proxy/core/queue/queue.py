"""The router's queue.

Requests wait in FIFOs, one per model, size, class and tenant. Short, long, and pinned or retried
requests have separate places. At a place the higher class goes first, then the tenant with the
least counter (see `fairness`), then the least key (see `urgency`). Where the head cannot go, later
tickets that need less context are tried.

A class with a request past its age goes ahead every second turn; aged classes alternate, so none
starves. Batch waits for all other requests of its model.

A full queue evicts (see `eviction`). Each process has a part that it may always fill; the fullest
process then evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import ceil, inf
from typing import NamedTuple

from proxy.core.fleet.leases import FIRST_ATTEMPT, Attempts, CacheWait
from proxy.core.model.types import RequestInfo
from proxy.core.queue.buckets import Buckets, RemoteQueues, place_of
from proxy.core.queue.cache_waits import CacheWaits
from proxy.core.queue.dispatch import DispatchRound, FinalPlacement, LastDispatches, Placement
from proxy.core.queue.eviction import NO_AMOUNTS, Amounts, Evictions, add_amounts, amounts_of
from proxy.core.queue.fairness import FairnessSettings, ShareCounters
from proxy.core.queue.request_fifo import LONG, SHORT, Place, SortKey
from proxy.core.queue.slot_rate import SlotRate
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import NOT_URGENT, Urgency
from proxy.core.tenants.tenants import Rank

MAX_RETRY_AFTER_S = 120
MAX_CACHE_WAIT_SHARE = 0.5  # of the longest wait
SPARE_DEADLINES = 64  # outdated deadlines before a sweep
RANKS = tuple(Rank)
BATCH = Rank.BATCH
ABOVE_BATCH = RANKS[:BATCH]


class Deadline(NamedTuple):
    at: float
    number: int  # decides between equal times
    ticket: Ticket


class Queue:
    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_wait_s: float,
        max_tokens: int | None = None,
        fairness: FairnessSettings | None = None,
    ) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_tokens = max_tokens
        self.max_wait_s = max_wait_s
        self.fairness = fairness or FairnessSettings()
        self.bytes = 0
        self.tokens = 0
        self.length = 0
        self._num_in_order = 0  # without requests that wait for a cache
        self.remote_queues: RemoteQueues | None = None  # in other processes
        self.shares = ShareCounters()
        self.cache_waits = CacheWaits()
        self.ended: dict[Ticket, FinalPlacement] = {}  # not yet reported by the router's `pop_due`
        self._evictions = Evictions()
        self._buckets = Buckets()
        self.last_dispatches = LastDispatches()
        self._deadlines: list[Deadline] = []
        self._numbers = count()
        self._slot_rate = SlotRate()

    def __len__(self) -> int:
        return self.length

    def has_room(self, more: Amounts) -> bool:
        return max(self._excess(more)) <= 0

    def make_room(
        self, more: Amounts, place: Callable[[Ticket, float], Placement | None], now: float
    ) -> bool:
        """Return whether there is room; place the last turns that wait for a cache elsewhere."""
        if self.has_room(more):
            return True
        stuck: set[Place] = set()
        for tickets in self.cache_waits.placeable_elsewhere():
            for ticket in tickets:
                at, until = place_of(ticket.info), ticket.cache_until
                if at in stuck:
                    break
                ticket.cache_until = now
                placement = None if self.any_ahead_of(ticket.info) else place(ticket, now)
                if placement is None or isinstance(placement, CacheWait):
                    ticket.cache_until = until
                    stuck.add(at)
                    break
                self.remove(ticket)
                self.ended[ticket] = placement
                if self.has_room(more):
                    return True
        return False

    @property
    def mean_amounts(self) -> Amounts:
        length = max(self.length, 1)
        return Amounts(1, self.bytes / length, self.tokens / length)

    def _excess(self, request: Amounts) -> Amounts:
        """Return the excess with a request; none within this process's part."""
        total, limits = self._total_amounts(), self._max_amounts()
        if (others := self.remote_queues) is not None:
            parts, own = others.processes + 1, add_amounts(self._own_amounts(), request)
            if all(amount * parts <= limit for amount, limit in zip(own, limits, strict=True)):
                return NO_AMOUNTS
        if not total.requests:  # an empty queue takes a prompt of any size
            limits = limits._replace(tokens=inf)
        return add_amounts(add_amounts(total, request), limits, -1)

    def _own_amounts(self) -> Amounts:
        return Amounts(self.length, self.bytes, self.tokens)

    def _total_amounts(self) -> Amounts:
        if (others := self.remote_queues) is None:
            return self._own_amounts()
        remote = Amounts(others.length, others.bytes, others.tokens)
        return add_amounts(self._own_amounts(), remote)

    def _max_amounts(self) -> Amounts:
        max_tokens = inf if self.max_tokens is None else self.max_tokens
        return Amounts(self.max_requests, self.max_bytes, max_tokens)

    def choose_evicted(self, info: RequestInfo) -> list[Ticket]:
        return self._evictions.choose_evicted(
            info,
            self._buckets.by_key.values(),
            self._excess(amounts_of(info)),
            self._whole_amounts(),
        )

    def _whole_amounts(self) -> Amounts:
        return Amounts(self.max_requests or inf, self.max_bytes, self.max_tokens or inf)

    def choose_surplus(self) -> list[Ticket]:
        """Return tickets to evict, if this is the fullest process."""
        others = self.remote_queues
        if others is None or not others.length or not self.length:
            return []
        others_have_more = others.has_more(self._own_amounts())
        excess = add_amounts(self._total_amounts(), self._max_amounts(), -1)
        over = Amounts(
            *(0 if more else x for x, more in zip(excess, others_have_more, strict=True))
        )
        if max(over) <= 0:
            return []
        fifos = self._buckets.by_key.values()
        return self._evictions.choose_surplus(fifos, over, self._whole_amounts())

    @property
    def has_waiting(self) -> bool:
        """Whether any process has a request that waits."""
        return self.length > 0 or (self.remote_queues is not None and self.remote_queues.waits)

    def count_waiting(self, model: str, *, long: bool) -> int:
        """Return the number of waiting requests above batch; remote ones count as 1."""
        place = Place(model, LONG if long else SHORT)
        count = sum(self._buckets.count(place, rank) for rank in ABOVE_BATCH)
        remote = self.remote_queues
        return count + (remote is not None and remote.has_higher_class(place, BATCH))

    def has_waiting_for(self, model: str) -> bool:
        if any(self._buckets.places(model)):
            return True
        remote = self.remote_queues
        return remote is not None and any(
            remote.has_higher_class(Place(model, size), BATCH + 1) for size in (SHORT, LONG)
        )

    def any_ahead_of(self, info: RequestInfo) -> bool:
        if not self.has_waiting:
            return False
        place = place_of(info)
        if self.remote_queues is not None and self.remote_queues.has_higher_class(
            place, info.rank + 1
        ):
            return True
        if any(self._buckets.count(place, rank) for rank in RANKS[: info.rank + 1]):
            return True
        others = self._buckets.places(info.model) if info.rank is BATCH else ()
        return any(rank is not BATCH for _, rank in others)

    def fronts(self) -> dict[tuple[Place, Rank], tuple[SortKey, float]]:
        """Return each bucket's first turn and oldest arrival."""
        buckets = self._buckets.in_order()
        return {at: (bucket.order.first().sort_key, bucket.oldest) for at, bucket in buckets}

    def ahead_of(self, info: RequestInfo, key: float) -> int:
        place, buckets = place_of(info), self._buckets
        above = sum(buckets.count(place, rank) for rank in RANKS[: info.rank])
        return above + buckets.count_ahead(place, info.rank, info.tenant, key)

    def longest_wait_s(self, info: RequestInfo) -> float:
        return self.fairness.batch_wait_s if info.rank is BATCH else self.max_wait_s

    def push(
        self,
        info: RequestInfo,
        now: float,
        attempts: Attempts = FIRST_ATTEMPT,
        *,
        urgency: Urgency = NOT_URGENT,
        cache_wait: CacheWait | None = None,
    ) -> Ticket:
        wait_s, latest = self.longest_wait_s(info), urgency.latest_start
        for_client, key = latest < now + wait_s, max(urgency.key, now)
        deadline = latest if for_client else now + wait_s
        ticket = Ticket(info, attempts, now, deadline, for_client, key)
        if info.tenant is not None:
            self.shares.add(info.tenant, info.rank)
        self._put(ticket, now, cache_wait)
        heappush(self._deadlines, Deadline(ticket.deadline, next(self._numbers), ticket))
        self._evictions.add(info)
        self.length += 1
        self.bytes += info.body_bytes
        self.tokens += info.prompt_tokens
        return ticket

    def _put(self, ticket: Ticket, now: float, cache_wait: CacheWait | None) -> None:
        """Put a ticket in order with others, or let it wait for a cache."""
        ticket.cache_wait = cache_wait
        if cache_wait is not None:
            due = cache_wait.until if cache_wait.others_late else now + cache_wait.seconds
            ticket.cache_due = min(ticket.cache_due, due)
            ticket.cache_until = min(ticket.cache_until, cache_wait.until)
            self.cache_waits.add(ticket, cache_wait)
        else:
            if not self._num_in_order:
                self._slot_rate.resume(now)
            self._slot_rate.record_waiting(now)
            self._num_in_order += 1
        self._buckets.push(ticket)
        if self.remote_queues is not None:
            self.remote_queues.report_change()

    def _extract(self, ticket: Ticket) -> None:
        self._buckets.remove(ticket)
        if ticket.cache_wait is not None:
            self.cache_waits.remove(ticket, ticket.cache_wait)
        else:
            self._num_in_order -= 1

    def _requeue(self, ticket: Ticket, now: float, cache_wait: CacheWait | None = None) -> None:
        """Put a ticket in order, or let it wait for another cache."""
        self._extract(ticket)
        self._put(ticket, now, cache_wait)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it has left before."""
        if ticket.removed:
            return False
        ticket.removed = True
        info = ticket.info
        self._extract(ticket)
        if info.tenant is not None:
            last = not self._buckets.has_waiting(info.tenant, info.rank)
            self.shares.remove(info.tenant, info.rank, last=last)
        if self.remote_queues is not None:
            self.remote_queues.report_change()
        self._evictions.remove(info)
        self.length -= 1
        self.bytes -= info.body_bytes
        self.tokens -= info.prompt_tokens
        if len(self._deadlines) > 2 * self.length + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if not entry.ticket.removed]
            heapify(self._deadlines)
        return True

    def pop_expired(self, now: float) -> list[Ticket]:
        expired: list[Ticket] = []
        while (due := self._deadlines) and (due[0].at <= now or due[0].ticket.removed):
            ticket = heappop(due).ticket
            if self.remove(ticket):  # may replace the heap
                expired.append(ticket)
        return expired

    def dispatch(
        self, place: Callable[[Ticket, float], Placement | None], now: float = 0.0
    ) -> Iterator[tuple[Ticket, FinalPlacement]]:
        """Remove and yield the tickets that `place` places or refuses."""
        for ticket in self.cache_waits.pop_ended(now):
            self._requeue(ticket, now)
        ages, remote = self.fairness.ages, self.remote_queues
        this_round = DispatchRound(self._buckets, place, now, ages, self.last_dispatches, remote)
        while (placed := this_round.dispatch_next()) is not None:
            ticket, placement = placed
            if isinstance(placement, CacheWait):
                self._requeue(ticket, now, cache_wait=placement)
            else:
                self.remove(ticket)
                yield ticket, placement

    def record_freed_slot(self, now: float) -> None:
        if not self.max_requests:  # no queue: each refused request is demand
            self._slot_rate.restart_if_old(now)
        elif not self._num_in_order:
            return
        self._slot_rate.record_freed(now)

    def wait_s(self, now: float, ahead: int) -> float | None:
        """Return the predicted wait; None if it is unknown how often slots become free."""
        return self._slot_rate.wait_s(now, ahead, is_pause=not self._num_in_order)

    def retry_after_s(self, now: float) -> int:
        wait = self.wait_s(now, self._num_in_order)
        if wait is None:
            wait = min(self.cache_waits.next_slot_s(now), self.max_wait_s)
        return min(max(ceil(wait), 1), MAX_RETRY_AFTER_S)
