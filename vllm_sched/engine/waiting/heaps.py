"""The places of the waiting requests: heaps by group and lane, with lazy removal."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

from vllm.v1.request import Request

from vllm_sched.engine.waiting.lane_counts import LaneCounts, LaneKey

# Entries of requests that left are removed at the top of a heap, or once they are the majority
# and more than this.
MAX_DEAD_ENTRIES = 64
# Other groups are LoRA adapters without a slot.
IN_LANE = 0
SET_ASIDE = -1  # could not begin for another reason


class Entry(NamedTuple):
    """A place in a lane; entries compare by `order`, which is unique."""

    order: Any  # when it is due and a number, or with priority scheduling the request
    request: Request
    since: float  # when it began to wait
    tokens: int
    gate_since: float  # as `since`; earlier if a request behind has waited longer


class Place(NamedTuple):
    entry: Entry
    lane_key: LaneKey
    group: int = IN_LANE


class LaneHeaps:
    def __init__(
        self, num_policies: int, open_adapters: Callable[[], Collection[int] | None]
    ) -> None:
        self.places: dict[Request, Place] = {}
        # A heap for each lane, by group.
        self.lanes: dict[int, dict[LaneKey, list[Entry]]] = {IN_LANE: {}}
        self.set_aside: dict[Request, None] = {}  # in the order of the last offers
        self.counts = LaneCounts(num_policies)
        self._open_adapters = open_adapters  # None for all
        # Requests of each group other than IN_LANE, by lane.
        self._group_sizes: defaultdict[int, Counter[LaneKey]] = defaultdict(Counter)
        self._dead_entries = 0  # entries of requests that left

    def __iter__(self) -> Iterator[Request]:
        """Iterate in vLLM's order, without regard to lanes and gates."""
        return (entry.request for entry in sorted(place.entry for place in self.places.values()))

    def add(self, place: Place) -> None:
        entry, lane_key, group = place
        if group == SET_ASIDE:
            self.set_aside[entry.request] = None
        else:
            heapq.heappush(self.lanes.setdefault(group, {}).setdefault(lane_key, []), entry)
        self.places[entry.request] = place
        self._count(place, 1)

    def remove(self, request: Request) -> None:
        """Remove a request; its entry stays in the heap for a while."""
        self._dead_entries += self._remove_place(request).group != SET_ASIDE
        if self._dead_entries > MAX_DEAD_ENTRIES and self._dead_entries > len(self.places):
            self._drop_dead()

    def pop(self, request: Request) -> Place:
        """Remove a request that is the head of its heap, or set aside."""
        place = self._remove_place(request)
        if place.group != SET_ASIDE:
            heapq.heappop(self.lanes[place.group][place.lane_key])
        return place

    def reorder_head(self, group: int, lane_key: LaneKey, order: Any) -> None:
        later = self.lanes[group][lane_key][0]._replace(order=order)
        heapq.heapreplace(self.lanes[group][lane_key], later)
        self.places[later.request] = Place(later, lane_key, group)

    def head(self, group: int, lane_key: LaneKey) -> Entry | None:
        """Return the head of a lane, after a removal of dead entries before it."""
        heap = self.lanes[group][lane_key]
        while heap:
            entry = heap[0]
            place = self.places.get(entry.request)
            if place is not None and place.entry is entry:
                return entry
            heapq.heappop(heap)
            self._dead_entries -= 1
        return None

    def drop_empty_groups(self, groups: Iterable[int]) -> None:
        for group in groups:
            if group != IN_LANE and not self.lanes[group]:
                del self.lanes[group]
                self._group_sizes.pop(group, None)

    def open_groups(self) -> list[int]:
        if len(self.lanes) == 1:
            return [IN_LANE]
        adapters = self._open_adapters()
        if adapters is None:
            return list(self.lanes)
        return [IN_LANE, *(adapter for adapter in adapters if adapter in self.lanes)]

    def heads(self, groups: Iterable[int]) -> Iterator[tuple[LaneKey, Entry]]:
        for group in groups:
            for lane_key in self.lanes[group]:
                if (entry := self.head(group, lane_key)) is not None:
                    yield lane_key, entry

    def gate_since_behind(self, lane_key: LaneKey, order: Any) -> float:
        """Return since when the head waits for its gate, if `order` comes before it."""
        heap = self.lanes[IN_LANE].get(lane_key)
        if not heap or heap[0].request not in self.places or not order < heap[0].order:
            return inf
        return heap[0].gate_since

    def update_waits(self, now: float) -> None:
        heads = self.heads(self.open_groups())
        self.counts.set_waits((lane_key, now - entry.gate_since) for lane_key, entry in heads)

    def update_held(self, turned_away: Iterable[Request]) -> None:
        """Count the requests that policies hold, and other requests that cannot begin."""
        barred = Counter(self.places[request].lane_key for request in turned_away)
        if self._group_sizes:
            open_groups = self.open_groups()
            for group, sizes in self._group_sizes.items():
                if group not in open_groups:
                    barred.update(sizes)
        self.counts.set_held(barred)

    def _remove_place(self, request: Request) -> Place:
        place = self.places.pop(request)
        if place.group == SET_ASIDE:
            del self.set_aside[request]
        self._count(place, -1)
        return place

    def _count(self, place: Place, requests: int) -> None:
        entry, lane_key, group = place
        self.counts.add(lane_key, requests, requests * entry.tokens)
        if group != IN_LANE:
            self._group_sizes[group][lane_key] += requests

    def _drop_dead(self) -> None:
        self.lanes = {IN_LANE: {}}
        for entry, lane_key, group in self.places.values():
            if group != SET_ASIDE:
                self.lanes.setdefault(group, {}).setdefault(lane_key, []).append(entry)
        for heaps in self.lanes.values():
            for heap in heaps.values():
                heapq.heapify(heap)
        for group, sizes in list(self._group_sizes.items()):
            if not any(sizes.values()):
                del self._group_sizes[group]
        self._dead_entries = 0
