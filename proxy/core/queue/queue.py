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

from proxy.core.fleet.leases import FIRST_ATTEMPT, Attempts, CacheWait
from proxy.core.model.types import RequestInfo
from proxy.core.queue.buckets import LONG, SHORT, Buckets, RemoteQueues, place_of
from proxy.core.queue.cache_waits import CacheWaits
from proxy.core.queue.dispatch import DispatchRound, End, Found, Overtaking
from proxy.core.queue.eviction import NOTHING, Amounts, QueueCapacity, add_amounts, amounts
from proxy.core.queue.fairness import FairnessSettings, ShareCounters
from proxy.core.queue.request_fifo import Place, Turn
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import NOT_URGENT, Urgency
from proxy.core.tenants.tenants import Rank

RATE_SAMPLE_S = 5.0  # per sample of freed slots
MAX_RETRY_AFTER_S = 120
MAX_CACHE_WAIT_SHARE = 0.5  # of the longest wait
SPARE_DEADLINES = 64  # outdated deadlines before a sweep
RANKS = tuple(Rank)
BATCH = Rank.BATCH
ABOVE_BATCH = RANKS[:BATCH]


class Queue:
    def __init__(
        self,
        most: int,
        most_bytes: int,
        max_wait_s: float,
        most_tokens: int | None = None,
        fairness: FairnessSettings | None = None,
    ) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.most_tokens = most_tokens
        self.max_wait_s = max_wait_s
        self.fairness = fairness or FairnessSettings()
        self.bytes = 0
        self.tokens = 0
        self.length = 0
        self._in_order = 0  # without requests that wait for a cache
        self.remote_queues: RemoteQueues | None = None  # in other processes
        self.turns = ShareCounters()
        self.cache_waits = CacheWaits()
        self.ended: dict[Ticket, End] = {}  # not yet reported by the router's `pop_due`
        self._capacity = QueueCapacity()
        self._lines = Buckets()
        self.aged = Overtaking()
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._numbers = count()
        self._freed = 0  # slots, since the start
        # Two samples (time, slots freed): older, newer. Time without waiting requests is excluded:
        # freed slots then measure demand, not speed.
        self._samples = ((0.0, 0), (0.0, 0))
        self._last_waiting_at = -inf  # a request was last seen waiting

    def __len__(self) -> int:
        return self.length

    def has_room(self, more: Amounts) -> bool:
        return max(self._excess(more)) <= 0

    def make_room(
        self, more: Amounts, end: Callable[[Ticket, float], Found | None], now: float
    ) -> bool:
        """Return whether there is room; place the last turns that wait for a cache elsewhere."""
        if self.has_room(more):
            return True
        stuck: set[Place] = set()
        for tickets in self.cache_waits.voluntary():
            for ticket in tickets:
                place, until = place_of(ticket.info), ticket.cache_until
                if place in stuck:
                    break
                ticket.cache_until = now
                answer = None if self.any_ahead_of(ticket.info) else end(ticket, now)
                if answer is None or isinstance(answer, CacheWait):
                    ticket.cache_until = until
                    stuck.add(place)
                    break
                self.remove(ticket)
                self.ended[ticket] = answer
                if self.has_room(more):
                    return True
        return False

    @property
    def usual(self) -> Amounts:
        length = max(self.length, 1)
        return 1, self.bytes / length, self.tokens / length

    def _excess(self, one: Amounts) -> Amounts:
        """Return the excess with a request; none within this process's part."""
        total, most = self._total(), self._limits()
        if (others := self.remote_queues) is not None:
            parts, own = others.processes + 1, add_amounts(self._own(), one)
            if all(amount * parts <= limit for amount, limit in zip(own, most, strict=True)):
                return NOTHING
        if not total[0]:  # an empty queue takes a prompt of any size
            most = most[0], most[1], inf
        return add_amounts(add_amounts(total, one), most, -1)

    def _own(self) -> Amounts:
        return self.length, self.bytes, self.tokens

    def _total(self) -> Amounts:
        if (others := self.remote_queues) is None:
            return self._own()
        return add_amounts(self._own(), (others.length, others.bytes, others.tokens))

    def _limits(self) -> Amounts:
        return self.most, self.most_bytes, inf if self.most_tokens is None else self.most_tokens

    def choose_evicted(self, info: RequestInfo) -> list[Ticket]:
        """Return the tickets to evict; none if that does not help."""
        return self._capacity.choose_evicted(
            info, self._lines.by_key.values(), self._excess(amounts(info)), self._shares()
        )

    def _shares(self) -> Amounts:
        return self.most or inf, self.most_bytes, self.most_tokens or inf

    def choose_surplus(self) -> list[Ticket]:
        """Return tickets to evict, if this is the fullest process."""
        others = self.remote_queues
        if others is None or not others.length or not self.length:
            return []
        others_have_more = others.has_more(self._own())
        over = [
            0 if skip else total - limit
            for total, limit, skip in zip(
                self._total(), self._limits(), others_have_more, strict=True
            )
        ]
        if max(over) <= 0:
            return []
        length, size, tokens = over
        lines = self._lines.by_key.values()
        return self._capacity.choose_surplus(lines, (length, size, tokens), self._shares())

    @property
    def has_waiting(self) -> bool:
        """True if a request waits here or in another process."""
        return self.length > 0 or (self.remote_queues is not None and self.remote_queues.waits)

    def count_waiting(self, model: str, *, long: bool) -> int:
        """Return the number of waiting requests above batch; remote ones count as 1."""
        place = model, LONG if long else SHORT
        found = sum(self._lines.count(place, rank) for rank in ABOVE_BATCH)
        return found + (
            self.remote_queues is not None and self.remote_queues.has_higher_class(place, BATCH)
        )

    def has_waiting_for(self, model: str) -> bool:
        if any(self._lines.places(model)):
            return True
        there = self.remote_queues
        sizes = SHORT, LONG
        return there is not None and any(
            there.has_higher_class((model, x), BATCH + 1) for x in sizes
        )

    def any_ahead_of(self, info: RequestInfo) -> bool:
        if not self.has_waiting:
            return False
        place = place_of(info)
        if self.remote_queues is not None and self.remote_queues.has_higher_class(
            place, info.rank + 1
        ):
            return True
        if any(self._lines.count(place, rank) for rank in RANKS[: info.rank + 1]):
            return True
        others = self._lines.places(info.model) if info.rank is BATCH else ()
        return any(rank is not BATCH for _, rank in others)

    def fronts(self) -> dict[tuple[Place, Rank], tuple[Turn, float]]:
        """Return each bucket's first turn and oldest arrival."""
        buckets = self._lines.in_order()
        return {at: (bucket.order.first().turn, bucket.oldest) for at, bucket in buckets}

    def ahead_of(self, info: RequestInfo, key: float) -> int:
        place, lines = place_of(info), self._lines
        above = sum(lines.count(place, rank) for rank in RANKS[: info.rank])
        return above + lines.count_ahead(place, info.rank, info.tenant, key)

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
            self.turns.add(info.tenant, info.rank)
        self._put(ticket, cache_wait, now)
        heappush(self._deadlines, (ticket.deadline, next(self._numbers), ticket))
        self._capacity.add(info)
        self.length += 1
        self.bytes += info.body_bytes
        self.tokens += info.prompt_tokens
        return ticket

    def _put(self, ticket: Ticket, cache_wait: CacheWait | None, now: float) -> None:
        """Put a ticket in order with others, or let it wait for a cache."""
        ticket.cache_wait = cache_wait
        if cache_wait is not None:
            due = cache_wait.until if cache_wait.only else now + cache_wait.seconds
            ticket.cache_due = min(ticket.cache_due, due)
            ticket.cache_until = min(ticket.cache_until, cache_wait.until)
            self.cache_waits.add(ticket, cache_wait)
        else:
            if not self._in_order:
                self._resume_samples(now)
            self._last_waiting_at = now
            self._in_order += 1
        self._lines.push(ticket)
        if self.remote_queues is not None:
            self.remote_queues.report_change()

    def _extract(self, ticket: Ticket) -> None:
        self._lines.remove(ticket)
        if ticket.cache_wait is not None:
            self.cache_waits.remove(ticket, ticket.cache_wait)
        else:
            self._in_order -= 1

    def _move(self, ticket: Ticket, cache_wait: CacheWait | None, now: float) -> None:
        self._extract(ticket)
        self._put(ticket, cache_wait, now)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it has left before."""
        if ticket.left:
            return False
        ticket.left = True
        info = ticket.info
        self._extract(ticket)
        if info.tenant is not None:
            last = not self._lines.has_waiting(info.tenant, info.rank)
            self.turns.remove(info.tenant, info.rank, last=last)
        if self.remote_queues is not None:
            self.remote_queues.report_change()
        self._capacity.remove(info)
        self.length -= 1
        self.bytes -= info.body_bytes
        self.tokens -= info.prompt_tokens
        if len(self._deadlines) > 2 * self.length + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].left]
            heapify(self._deadlines)
        return True

    def pop_expired(self, now: float) -> list[Ticket]:
        gone: list[Ticket] = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].left):
            ticket = heappop(deadlines)[2]
            if self.remove(ticket):
                gone.append(ticket)
                deadlines = self._deadlines
        return gone

    def dispatch(
        self, end: Callable[[Ticket], Found | None], now: float = 0.0
    ) -> Iterator[tuple[Ticket, End]]:
        """Remove and yield the tickets that `end` places or refuses."""
        for ticket in self.cache_waits.pop_ended(now):
            self._move(ticket, None, now)
        ages, remote_queues = self.fairness.ages, self.remote_queues
        turn = DispatchRound(self._lines, end, now, ages, self.aged, remote_queues)
        while (found := turn.next()) is not None:
            ticket, ended = found
            if isinstance(ended, CacheWait):
                self._move(ticket, ended, now)
            else:
                self.remove(ticket)
                yield ticket, ended

    def record_freed_slot(self, now: float) -> None:
        if not self.most:  # no queue: each refused request is demand
            if now - self._samples[1][0] > 2 * RATE_SAMPLE_S:
                self._samples = ((now, self._freed),) * 2
        elif not self._in_order:
            return
        self._last_waiting_at = now
        self._freed += 1
        if now - self._samples[1][0] > RATE_SAMPLE_S:
            self._samples = self._samples[1], (now, self._freed)

    def _resume_samples(self, now: float) -> None:
        """Resume the samples after a pause; restart them after a long one."""
        if (idle_s := now - self._last_waiting_at) > 2 * RATE_SAMPLE_S:
            self._samples = ((now, self._freed),) * 2
        else:
            older, newer = self._samples
            self._samples = (older[0] + idle_s, older[1]), (newer[0] + idle_s, newer[1])

    def wait_s(self, now: float, ahead: int) -> float | None:
        """Return the predicted wait; None if the speed is unknown."""
        if not self._in_order:
            if now - self._last_waiting_at > 2 * RATE_SAMPLE_S:
                return None
            now = self._last_waiting_at
        since, before = self._samples[0]
        freed, seconds = self._freed - before, now - since
        return (ahead + 1) * seconds / freed if freed > 0 and seconds > 0 else None

    def retry_after_s(self, now: float) -> int:
        wait = self.wait_s(now, self._in_order)
        if wait is None:
            wait = min(self.cache_waits.next_slot_s(now), self.max_wait_s)
        return min(max(ceil(wait), 1), MAX_RETRY_AFTER_S)
