"""The places of the waiting requests: heaps by group and lane, with lazy removal."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

from vllm.v1.request import Request

from vllm_sched.engine.waiting.held import LaneCounts, LaneKey

# Entries of requests that left are removed at the front of a heap, or once they are the majority
# and more than this.
MAX_DEAD_ENTRIES = 64
# Other groups are LoRA adapters without a slot.
IN_LANE = 0
SET_ASIDE = -1  # could not begin for another reason


class Entry(NamedTuple):
    """A place in a lane; entries compare by `order`, which is unique."""

    order: Any  # when it is due and a number, or with priority scheduling the request
    request: Request
    since: float
    tokens: int
    gate_since: float  # for its gate; earlier if a request behind has waited longer


class Place(NamedTuple):
    entry: Entry
    lane: LaneKey
    group: int


class LaneHeaps:
    def __init__(
        self, num_policies: int, open_adapters: Callable[[], Collection[int] | None]
    ) -> None:
        self._open_adapters = open_adapters  # None for all
        # By group, then by lane.
        self._heaps: dict[int, dict[LaneKey, list[Entry]]] = {IN_LANE: {}}
        self._live: dict[Request, Place] = {}
        # The group SET_ASIDE, in the order of the last offers.
        self._aside: dict[Request, None] = {}
        # Requests of each other group, by lane.
        self._sizes: defaultdict[int, Counter[LaneKey]] = defaultdict(Counter)
        # The step in which a request in its lane could not begin.
        self._turned_away: dict[Request, int] = {}
        self._dead = 0  # entries of requests that left
        self._now = 0.0  # when the step began
        self.counted = LaneCounts(num_policies)
        self.counts, self.here = self.counted.by_policy, self.counted.here
        self.held = self.counted.note_gate

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: object) -> bool:
        return request in self._live

    def __iter__(self) -> Iterator[Request]:
        """Iterate in vLLM's order, without regard to lanes and gates."""
        return (entry.request for entry in sorted(place.entry for place in self._live.values()))

    def waits(self) -> Iterator[tuple[LaneKey, float]]:
        """Return the waits of fronts, and of requests set aside."""
        yield from self._waits_of_fronts(self._heaps)
        for entry, lane, _ in map(self._live.__getitem__, self._aside):
            yield lane, self._now - entry.gate_since

    def _gate_since_behind(self, lane: LaneKey, order: Any) -> float:
        heap = self._heaps[IN_LANE].get(lane)
        if not heap or heap[0].request not in self._live or not order < heap[0].order:
            return inf
        return heap[0].gate_since

    def _place(self, entry: Entry, lane: LaneKey, group: int = IN_LANE) -> None:
        heapq.heappush(self._heaps.setdefault(group, {}).setdefault(lane, []), entry)
        self._track(Place(entry, lane, group))

    def _track(self, place: Place) -> None:
        self._live[place.entry.request] = place
        self._count(place, 1)

    def _untrack(self, request: Request) -> None:
        place = self._live.pop(request)
        self._count(place, -1)
        if place.group == SET_ASIDE:
            del self._aside[request]

    def _count(self, place: Place, requests: int) -> None:
        entry, lane, group = place
        self.counted.add(lane, requests, requests * entry.tokens)
        if group != IN_LANE:
            self._sizes[group][lane] += requests

    def _waits_of_fronts(self, groups: Iterable[int]) -> Iterator[tuple[LaneKey, float]]:
        for group in groups:
            for lane, heap in self._heaps[group].items():
                self._drop_dead_front(heap)
                if heap:
                    yield lane, self._now - heap[0].gate_since

    def _count_held(self) -> None:
        barred: Counter[LaneKey] = Counter()
        if self._turned_away:
            barred.update(self._live[request].lane for request in self._turned_away)
        if self._sizes:
            open_groups = self._open_groups()
            for group, sizes in self._sizes.items():
                if group not in open_groups:
                    barred.update(sizes)
        self.counted.note_held(barred)

    def _open_groups(self) -> list[int]:
        if len(self._heaps) == 1:
            return [IN_LANE]
        adapters = self._open_adapters()
        if adapters is None:
            return list(self._heaps)
        return [IN_LANE, *(adapter for adapter in adapters if adapter in self._heaps)]

    def _drop_dead_front(self, heap: list[Entry]) -> None:
        while heap and (
            (live := self._live.get(heap[0].request)) is None or live.entry is not heap[0]
        ):
            heapq.heappop(heap)
            self._dead -= 1

    def _drop_dead(self) -> None:
        self._heaps = {IN_LANE: {}}
        for entry, lane, group in self._live.values():
            if group != SET_ASIDE:
                self._heaps.setdefault(group, {}).setdefault(lane, []).append(entry)
        for heaps in self._heaps.values():
            for heap in heaps.values():
                heapq.heapify(heap)
        for group in [group for group, sizes in self._sizes.items() if not any(sizes.values())]:
            del self._sizes[group]
        self._dead = 0
