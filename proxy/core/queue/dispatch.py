"""One dispatch round over all queued requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge
from itertools import islice
from sys import maxsize

from proxy.core.fleet.leases import CacheWait, Lease
from proxy.core.model.types import Refusal
from proxy.core.queue.buckets import (
    IN_ORDER,
    MAX_TRIED_TICKETS,
    AgeOrder,
    Buckets,
    LastDispatch,
    RemoteQueues,
)
from proxy.core.queue.request_fifo import APART, Entry, Place, RequestFifo
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank

BATCH = Rank.BATCH
FinalPlacement = Lease | Refusal
Placement = FinalPlacement | CacheWait
NO_TURN = LastDispatch()


class LastDispatches:
    """Each model's last dispatch; kept across rounds."""

    def __init__(self) -> None:
        self.by_model: dict[str, LastDispatch] = {}

    def last_dispatch(self, model: str, others: RemoteQueues | None) -> LastDispatch:
        last = self.by_model.get(model, NO_TURN)
        if others is not None and (remote := others.last_dispatch(model)).at > last.at:
            last = self.by_model[model] = remote
        return last

    def record(self, model: str, rank: Rank, now: float, *, passed: bool) -> None:
        """Record a dispatch; `passed` if ahead of a higher class."""
        before = self.by_model.get(model, NO_TURN)
        self.by_model[model] = LastDispatch(now, passed, rank if passed else before.passer)


class DispatchRound:
    """A round; it ends when no queued request can be dispatched.

    `place` places or refuses a request, lets it wait for a cache, or returns None.
    """

    def __init__(
        self,
        buckets: Buckets,
        place: Callable[[Ticket, float], Placement | None],
        now: float,
        ages: Mapping[Rank, float],
        last_dispatches: LastDispatches,
        remote_queues: RemoteQueues | None,
    ) -> None:
        self._buckets = buckets
        self._place = place
        self._now = now
        self._ages = ages
        self._last_dispatches = last_dispatches
        self._remote_queues = remote_queues
        # At a place, requests that need at least this much context have failed in this round.
        self._failed_need: dict[Place, int] = {}
        self._misses: dict[Place, int] = {}
        self._held_places: set[Place] = set()  # another process goes first

    def dispatch_next(self) -> tuple[Ticket, Placement] | None:
        """Return the next request and its result; None ends the round."""
        buckets = self._buckets.in_order()
        oldest: dict[str, dict[Rank, float]] = {}  # arrival per model and class
        for (place, rank), bucket in buckets:
            arrivals = oldest.setdefault(place.model, {})
            arrivals[rank] = min(arrivals.get(rank, bucket.oldest), bucket.oldest)
        highest = {model: min(arrivals) for model, arrivals in oldest.items()}  # of this process
        aged = {model: self._aged_classes(model, arrivals) for model, arrivals in oldest.items()}
        entries: dict[tuple[AgeOrder, Rank], list[Iterator[Entry]]] = {}
        for (place, rank), bucket in buckets:
            model = place.model
            if rank is BATCH and highest[model] is not BATCH and rank not in aged[model]:
                continue
            turn = aged[model].get(rank, IN_ORDER), rank
            in_bucket = bucket.order.below(partial(self._need_bound, place))
            entries.setdefault(turn, []).append(in_bucket)
        self._held_places.clear()
        for order, rank in sorted(entries):
            for *_, fifo in merge(*entries[order, rank]):
                placed = self._dispatch_from(fifo, order, aged[fifo.place.model])
                if placed is not None:
                    return placed
        return None

    def _dispatch_from(
        self, fifo: RequestFifo, order: AgeOrder, aged: Mapping[Rank, AgeOrder]
    ) -> tuple[Ticket, Placement] | None:
        """Dispatch from a FIFO, unless another process goes first."""
        (place, rank), others, now = (fifo.place, fifo.rank), self._remote_queues, self._now
        if fifo.least_need >= self._need_bound(place):
            return None
        if others is not None and others.has_earlier_turn(place, order, fifo.sort_key, now, aged):
            self._held_places.add(place)
            return None
        placed = self._place_first(fifo, aged=rank in aged)
        if placed is None:
            return None
        _, placement = placed
        if not isinstance(placement, CacheWait):
            self._last_dispatches.record(place.model, rank, now, passed=not order[0])
        return placed

    def _need_bound(self, place: Place) -> int:
        """Return the context need from which requests at a place are skipped."""
        if place in self._held_places or self._misses.get(place, 0) >= MAX_TRIED_TICKETS:
            return 0
        return maxsize if place.size == APART else self._failed_need.get(place, maxsize)

    def _aged_classes(self, model: str, local: Mapping[Rank, float]) -> dict[Rank, AgeOrder]:
        """Return the classes old enough to go ahead; `local`: this process's oldest arrivals."""
        oldest, others = {**local}, self._remote_queues
        if others is not None and others.waits:
            for rank, since in others.oldest(model).items():
                oldest[rank] = min(oldest.get(rank, since), since)
        last, highest = self._last_dispatches.last_dispatch(model, others), min(oldest)
        if last.passed:
            return {}
        # Two aged classes alternate.
        return {
            rank: (False, last.passer == rank) if rank > highest else IN_ORDER
            for rank, since in oldest.items()
            if self._now - since >= self._ages[rank]
        }

    def _place_first(self, fifo: RequestFifo, *, aged: bool) -> tuple[Ticket, Placement] | None:
        """Place the first ticket that can go; skip needs that failed before."""
        place, failed_need, misses = fifo.place, self._failed_need, self._misses
        for ticket in islice(fifo.tickets, MAX_TRIED_TICKETS):
            needs = ticket.info.needed_context
            if needs >= self._need_bound(place):
                continue
            ticket.aged = aged
            if (placed := self._place(ticket, self._now)) is not None:
                return ticket, placed
            misses[place] = misses.get(place, 0) + 1
            # A batch request may lack only the slots kept free for higher classes.
            failed_need[place] = min(failed_need.get(place, maxsize), needs)
        return None
