"""The queues of all processes as one queue: shared limits and a common order.

Each process owns a part of the limits that no other process can fill; see core's `queue`.

A free slot belongs to the request that is first in any queue. Another process holds its own request
back for a beat, in which the first request can take the slot. If the slot is still free because the
first request waits for something else, requests go one at a time. So a slot stays free for at most
one beat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from zlib import crc32

from proxy.core.queue.buckets import IN_ORDER, AgeOrder, LastDispatch
from proxy.core.queue.dispatch import NO_TURN
from proxy.core.queue.eviction import Amounts
from proxy.core.queue.queue import Queue
from proxy.core.queue.request_fifo import LONG, SHORT, Place, SortKey
from proxy.core.tenants.tenants import Rank
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.process_sheet import BYTES, PLACES, TOKENS, WAITING, QueueFront

HOLD_S = 0.01
REMOTE_HOLD_S = 0.04  # with queues on other hosts, whose states come later
STALE_HOLD_S = 1.0  # after this time a hold belongs to an earlier slot
SIZES = SHORT, LONG
EMPTY_FRONT = QueueFront()
BATCH = Rank.BATCH


class SharedQueues:
    def __init__(self, queue: Queue, shared_load: SharedLoad) -> None:
        self.length = self.bytes = self.tokens = 0  # on this host, as the limits are
        self.waits = False  # True if a request waits in any other queue
        self.holds_back = False  # True if a request here is held back
        self.request_came = asyncio.Event()  # set when a request is queued here
        self._queue = queue
        self._shared_load = shared_load
        self._sheets = shared_load.peers_of(lambda sheet: sheet)
        self.processes = len(self._sheets.local)
        queue.cache_waits.processes = self.processes + 1
        self._fronts: dict[tuple[int, Rank], QueueFront] = {}  # this process's fronts, as written
        self._last_dispatches: dict[str, LastDispatch] = {}
        # Time of the last pass out of order, or of the first hold.
        self._passed_at: dict[Place, float] = {}
        self._changed = False
        self._hold_s = HOLD_S

    def report_change(self) -> None:
        """Write the queue's state at the end of this turn."""
        self._changed = True
        self.request_came.set()
        self._shared_load.schedule_flush(urgent=True)

    def has_higher_class(self, place: Place, rank: int) -> bool:
        """Return True if a request of a class above `rank` waits there in another process."""
        if not self.waits:
            return False
        if rank > BATCH and self._has_any_above_batch(place.model):
            return True  # batch waits for all sizes of its model
        at, above = place_index(place), list(Rank)[:rank]
        return any(
            sheet.read_front(at, higher).tenant for sheet in self._sheets for higher in above
        )

    def has_more(self, own: Amounts) -> tuple[bool, bool, bool]:
        """Return for each amount whether another process has more than this one.

        Of processes with equal amounts, the first counts as having more.
        """
        before = self._shared_load.process
        length, size, tokens = (
            any(
                sheet.count(counter) + (at < before) > amount
                for at, sheet in enumerate(self._sheets.local)
            )
            for counter, amount in zip((WAITING, BYTES, TOKENS), own, strict=True)
        )
        return length, size, tokens

    def oldest(self, model: str) -> dict[Rank, float]:
        arrivals: dict[Rank, float] = {}
        for size in SIZES:
            for rank, front in self._fronts_at(Place(model, size)):
                arrivals[rank] = min(arrivals.get(rank, front.oldest), front.oldest)
        return arrivals

    def last_dispatch(self, model: str) -> LastDispatch:
        at = place_index(Place(model, ""))
        return max((sheet.read_last(at) for sheet in self._sheets), default=NO_TURN)

    def has_earlier_turn(
        self, place: Place, order: AgeOrder, key: SortKey, now: float, aged: Mapping[Rank, AgeOrder]
    ) -> bool:
        """Return True if a request of another process should get the free slot."""
        if not self.waits:
            return False
        if key[0] is BATCH and order == IN_ORDER and self._has_any_above_batch(place.model):
            self.holds_back = True
            return True
        remote = (
            (aged.get(rank, IN_ORDER), (rank, *order_of(front)))
            for rank, front in self._fronts_at(place)
        )
        if min(remote, default=(order, key)) >= (order, key):
            self._passed_at.pop(place, None)
            return False
        waited_s = now - self._passed_at.setdefault(place, now)
        if waited_s >= self._hold_s:
            self._passed_at[place] = now
        holds = waited_s < self._hold_s or waited_s > STALE_HOLD_S
        self.holds_back = self.holds_back or holds
        return holds

    def _has_any_above_batch(self, model: str) -> bool:
        return any(self.has_higher_class(Place(model, size), BATCH) for size in SIZES)

    def _fronts_at(self, place: Place) -> Iterator[tuple[Rank, QueueFront]]:
        at = place_index(place)
        for sheet in self._sheets:
            for rank in Rank:
                if (front := sheet.read_front(at, rank)).tenant:
                    yield rank, front

    def publish(self) -> None:
        """Write the queue's length and the first request of each place."""
        if not self._changed:
            return
        self._changed = False
        sheet, queue = self._shared_load.sheet, self._queue
        sheet.write_count(BYTES, queue.bytes)
        sheet.write_count(TOKENS, queue.tokens)
        fronts: dict[tuple[int, Rank], QueueFront] = {}
        for (place, rank), (key, oldest) in queue.fronts().items():
            at = place_index(place), rank
            _, virtual, tenant, since = key
            front, other = QueueFront(tenant, virtual, since, oldest), fronts.get(at)
            if other is not None:
                front = min(front, other, key=order_of)._replace(oldest=min(oldest, other.oldest))
            fronts[at] = front
        for at in self._fronts.keys() | fronts.keys():
            sheet.write_front(*at, fronts.get(at, EMPTY_FRONT))
        self._fronts = fronts
        for model, last in queue.last_dispatches.by_model.items():
            if self._last_dispatches.get(model) is not last:
                self._last_dispatches[model] = last
                sheet.write_last(place_index(Place(model, "")), last)
        sheet.write_count(WAITING, queue.length)

    def read_peers(self, now: float) -> None:  # noqa: ARG002
        self._hold_s = REMOTE_HOLD_S if self._shared_load.table.remote_in_use else HOLD_S
        self.waits = any(sheet.count(WAITING) for sheet in self._sheets)
        sheets = self._sheets.local
        self.length = sum(sheet.count(WAITING) for sheet in sheets)
        if self.length:
            self.bytes = sum(sheet.count(BYTES) for sheet in sheets)
            self.tokens = sum(sheet.count(TOKENS) for sheet in sheets)
        else:
            self.bytes = self.tokens = 0


def order_of(front: QueueFront) -> tuple[float, int, float]:
    return front.virtual, front.tenant, front.since


def place_index(place: Place) -> int:
    """Return the index of a model and size.

    Two with the same index sometimes yield to each other.
    """
    return crc32("\0".join(place).encode(errors="replace")) % PLACES
