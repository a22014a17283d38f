"""The queues of all processes as one: their limits, and whose turn it is.

Each has a part of the limits that no other can fill: see `queue`.

A place that becomes free belongs to whoever is first in any of the queues. Whoever sees it and is
not first holds back for a beat, in which the one who is looks too, and takes it; if nobody has,
because that one waits for something else, one at a time goes. So nobody waits for ever, and a place
stays free for a beat at most.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from zlib import crc32

from proxy.core.queue.buckets import IN_ORDER
from proxy.core.queue.dispatch import NO_TURN
from proxy.core.tenants.tenants import Rank
from proxy.processes.shared.shared_memory import BYTES, PLACES, TOKENS, WAITING, QueueFront

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.core.queue.buckets import LastDispatch, Late
    from proxy.core.queue.eviction import Amounts
    from proxy.core.queue.queue import Queue
    from proxy.core.queue.request_fifo import Place, Turn
    from proxy.processes.shared.load import SharedLoad

BEAT_S = 0.01
LONG_AGO_S = 1.0  # what was held back for is another place
SIZES = "short", "long"
NOBODY = QueueFront()
BATCH = Rank.BATCH


class SharedQueues:
    """The queues of the others."""

    def __init__(self, queue: Queue, sharing: SharedLoad) -> None:
        self.length = self.bytes = self.tokens = 0
        self.processes = len(sharing.peers)
        self.held = False  # whether somebody here holds back
        self.came = asyncio.Event()  # somebody waits here now
        self._queue = queue
        self._sharing = sharing
        self._sheets = [peer.sheet for peer in sharing.peers]
        self._fronts: dict[tuple[int, Rank], QueueFront] = {}  # as they were told, of ours
        self._lasts: dict[str, LastDispatch] = {}
        self._passed: dict[Place, float] = {}  # when one last went before others, or began to wait
        self._moved = False

    # As the queue needs it

    def moved(self) -> None:
        """Tell the others."""
        self._moved = True
        self.came.set()
        self._sharing.speak()

    def before(self, place: Place, rank: int) -> bool:
        """Whether any of a class above this number waits there."""
        if not self.length:
            return False
        if rank > BATCH and self._higher(place[0]):
            return True  # batch waits for all of its model
        at, above = place_of(place), list(Rank)[:rank]
        return any(sheet.read_front(at, each).waits for sheet in self._sheets for each in above)

    def has_more(self, own: Amounts) -> tuple[bool, bool, bool]:
        """Of what any of them has more than this one; of as much, the first of them has more."""
        before = self._sharing.process
        length, size, tokens = (
            any(sheet.count(which) + (at < before) > mine for at, sheet in enumerate(self._sheets))
            for which, mine in zip((WAITING, BYTES, TOKENS), own, strict=True)
        )
        return length, size, tokens

    def oldest(self, model: str) -> dict[Rank, float]:
        """Since when the oldest of each class waits there."""
        found: dict[Rank, float] = {}
        for size in SIZES:
            for rank, front in self._fronts_at((model, size)):
                found[rank] = min(found.get(rank, front.oldest), front.oldest)
        return found

    def last(self, model: str) -> LastDispatch:
        """Return the last turn there."""
        at = place_of((model, ""))
        return max((sheet.read_last(at) for sheet in self._sheets), default=NO_TURN)

    def goes_first(
        self, place: Place, order: Late, turn: Turn, now: float, aged: Mapping[Rank, Late]
    ) -> bool:
        """Whether somebody there is to have what is free now."""
        if not self.length:
            return False
        if turn[0] is BATCH and order == IN_ORDER and self._higher(place[0]):
            return self._hold()
        theirs = (
            (aged.get(rank, IN_ORDER), (rank, front.virtual, front.since))
            for rank, front in self._fronts_at(place)
        )
        if min(theirs, default=(order, turn)) >= (order, turn):
            self._passed.pop(place, None)
            return False
        waited_s = now - self._passed.setdefault(place, now)
        if waited_s >= BEAT_S:
            self._passed[place] = now
        return self._hold() if waited_s < BEAT_S or waited_s > LONG_AGO_S else False

    def _hold(self) -> bool:
        self.held = True
        return True

    def _higher(self, model: str) -> bool:
        return any(self.before((model, size), BATCH) for size in SIZES)

    def _fronts_at(self, place: Place) -> Iterator[tuple[Rank, QueueFront]]:
        at = place_of(place)
        for sheet in self._sheets:
            for rank in Rank:
                if (front := sheet.read_front(at, rank)).waits:
                    yield rank, front

    # As the others do

    def tell(self) -> None:
        """Say how long the queue is, and who is first of each place."""
        if not self._moved:
            return
        self._moved = False
        sheet, queue = self._sharing.sheet, self._queue
        sheet.write_count(BYTES, queue.bytes)
        sheet.write_count(TOKENS, queue.tokens)
        fronts: dict[tuple[int, Rank], QueueFront] = {}
        for (place, rank), ((_, virtual, since), oldest) in queue.fronts().items():
            at = place_of(place), rank
            front, other = QueueFront(1, virtual, since, oldest), fronts.get(at)
            if other is not None:
                front = min(front, other)._replace(oldest=min(oldest, other.oldest))
            fronts[at] = front
        for at in self._fronts.keys() | fronts.keys():
            sheet.write_front(*at, fronts.get(at, NOBODY))
        self._fronts = fronts
        for model, last in queue.aged.last.items():
            if self._lasts.get(model) is not last:
                self._lasts[model] = last
                sheet.write_last(place_of((model, "")), last)
        sheet.write_count(WAITING, queue.length)

    def take(self, now: float) -> None:  # noqa: ARG002
        """Read how long theirs are."""
        sheets = self._sheets
        self.length = sum(sheet.count(WAITING) for sheet in sheets)
        if self.length:
            self.bytes = sum(sheet.count(BYTES) for sheet in sheets)
            self.tokens = sum(sheet.count(TOKENS) for sheet in sheets)
        else:
            self.bytes = self.tokens = 0


def place_of(place: Place) -> int:
    """Say where a model and size are told; two that share it yield to each other at times."""
    return crc32("\0".join(place).encode(errors="replace")) % PLACES
