"""A waiting queue of lanes, each with a gate, in the place of vLLM's own.

Upstream's scan takes the head of one queue and stops at the first that does not fit. Here the
requests stand in lanes that the policies name; a lane whose gate is closed costs nothing, however
many wait in it. Among open lanes the most urgent is offered, and of equals the head that upstream
would serve first, so that with all gates open and no urgency the order is upstream's, first come
first served or by priority.

Two promises to the scan: what was peeked is what is popped (blocks were allocated for it), and
`len` counts everybody while `bool` tells only whether somebody may enter now.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_sched.policies.types import Gate, LaneCount

LaneKey = tuple[str, ...]  # a lane for each policy

# Dead entries are swept out once there are this many and they are the majority.
SWEEP = 64
# For so many steps one that could not begin is not thought to be able to.
RETRY_STEPS = 8
# Of those who belong elsewhere so many move in a step, at most. A prefix that thousands share can
# be cached from one step to the next.
MOST_MOVES = 32
# Out of the way of those behind them so many, who may not enter themselves, while what was read of
# their prefixes is no more than so many blocks: a prefix that is gone is soon looked up.
MOST_PUT_ASIDE, MOST_READ = 256, 2048


class Entry(NamedTuple):
    """A place in a lane. Entries of one queue compare by `order`, which is never equal."""

    order: Any  # a number, or the request itself where upstream orders by priority
    request: Request
    since: float
    tokens: int
    owed_since: float  # what its gate goes by: it may stand in front of one who waits for longer


class LaneQueue(RequestQueue):
    """Requests in lanes; see the module's text."""

    def __init__(
        self,
        *,
        by_priority: bool,
        lanes_of: Callable[[Request], LaneKey],
        gate_of: Callable[[LaneKey, Request, float], Gate],
        urgency_of: Callable[[LaneKey, Request, float], tuple[float, ...]],
        blocks_read: Callable[[], int],
        clock: Callable[[], float],
        num_policies: int,
    ) -> None:
        self._by_priority = by_priority
        self._lanes_of = lanes_of
        self._gate_of = gate_of
        self._urgency_of = urgency_of
        self._blocks_read = blocks_read  # of cached prefixes, to tell lanes in this step
        self._clock = clock
        self._heaps: dict[LaneKey, list[Entry]] = {}
        self._live: dict[Request, tuple[Entry, LaneKey]] = {}
        self._dead = 0
        self._last = 0  # order of the newest at the end
        self._first = 0  # order of the newest at the front
        # Those popped in this step: put back, they have not begun to wait anew.
        self._popped: dict[Request, tuple[float, LaneKey]] = {}
        # Those who were popped in the step before and stayed away: since when, and whence.
        self.entered: dict[Request, tuple[float, LaneKey]] = {}
        # Those whom upstream popped and put back, for they could not begin: in which step.
        self._turned_away: dict[Request, int] = {}
        self._steps = 0
        self._moves = 0  # in this step
        # The lanes whose fronts belong to another that they have yet to move to.
        self._strays: dict[LaneKey, LaneKey] = {}
        self._offer: Request | None = None
        self._peeked = False
        self._now = 0.0
        self.refused: Request | None = None  # offered in an earlier step, and found no room
        # The place of the request that a policy gave no tokens in this step.
        self._excused: tuple[Entry, LaneKey] | None = None
        self.counts: list[defaultdict[str, LaneCount]] = [
            defaultdict(LaneCount) for _ in range(num_policies)
        ]
        # How many wait where all policies' lanes meet, which is what a gate is asked for.
        self.here: Counter[LaneKey] = Counter()
        # And which policy holds them: the first that did when it was asked last, in this step.
        self._held_by: dict[LaneKey, int] = {}
        self._offers = False  # whether upstream looked for who enters, in this step
        self.offered = False  # and in the one before

    # What the scheduler does with it around a step

    def begin_step(self, now: float) -> None:
        """Let gates be asked anew."""
        self._now = now
        self._steps += 1
        self._moves = 0
        self._forget_offer()
        for counts in self.counts:
            for count in counts.values():
                count.waited = 0.0
        for lane, heap in self._heaps.items():
            self._bury(heap)
            if not heap:
                continue
            waited = now - heap[0].owed_since
            for counts, name in zip(self.counts, lane, strict=True):
                count = counts[name]
                if waited > count.waited:
                    count.waited = waited
        self._count_held()
        self._held_by.clear()
        self.offered, self._offers = self._offers, False

    def end_step(self) -> None:
        """Remember a request that was looked at and not taken."""
        if self._peeked and self._offer is not None:
            self.refused = self._offer
        self._excused = None
        self.entered, self._popped = self._popped, {}
        if self._turned_away:
            self._turned_away = {
                request: step
                for request, step in self._turned_away.items()
                if request in self._live and self._steps - step < RETRY_STEPS
            }
        self._forget_offer()

    def excuse(self) -> None:
        """Note that a policy gave the offered request no tokens in this step.

        No other request is offered in this step: vLLM 0.32 ends its scan here. vLLM 0.33 pops the
        request, asks for the next, and puts the request back, which then has the place it had.
        """
        self._peeked = False
        if self._offer is not None:
            self._turned_away.pop(self._offer, None)  # it came as far as one who can begin
            self._excused = self._live[self._offer]

    def could_begin(self, request: Request) -> bool:
        """Tell whether it was not turned away of late: for LoRA slots, its grammar, its input."""
        return request not in self._turned_away

    def held(self, lane: LaneKey, by: int | None) -> None:
        """Hear which policy's gate was closed to this lane's front, if one was."""
        if by is None:
            self._held_by.pop(lane, None)
        else:
            self._held_by[lane] = by

    def ask_gates(self) -> None:
        """Count anew who is held, by what all gates say now."""
        self.first_choice()
        self._count_held()

    def first_choice(self) -> Request | None:
        """Return who would be offered now; not kept on offer, for the gate may close again."""
        return self._offer or (self._choose() if self._live else None)

    # Upstream's interface

    def add_request(self, request: Request) -> None:
        """Append, or insert by priority."""
        self._last += 1
        self._push(request, self._last)

    def prepend_request(self, request: Request) -> None:
        """Put in front of everybody, or by priority."""
        self._first -= 1
        self._push(request, self._first)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put each in front of the one before, as upstream does."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """Return the request to admit next."""
        offer = self._offered()
        if offer is None:
            raise IndexError("peek from a queue without an open lane")
        self._peeked = True
        return offer

    def pop_request(self) -> Request:
        """Take the request that `peek_request` returned."""
        request = self._offered()
        if request is None:
            raise IndexError("pop from a queue without an open lane")
        entry, lane = self._live[request]
        heapq.heappop(self._heaps[lane])  # it is the head: that is how it came to be offered
        self._drop(request)
        self._popped[request] = entry.since, self._strays.get(lane, lane)
        if self.refused is request and self._excused is None:
            self.refused = None
        self._forget_offer()
        return request

    def remove_request(self, request: Request) -> None:
        """Remove one that must be there."""
        if request not in self._live:
            raise ValueError(f"request {request.request_id} is not waiting")
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those that are there; their places are swept later."""
        for request in requests:
            if request in self._live:
                self._drop(request)
                self._dead += 1
            if self.refused is request:
                self.refused = None
        self._forget_offer()
        if self._dead > SWEEP and self._dead > len(self._live):
            self._sweep()

    def __bool__(self) -> bool:
        """Tell whether somebody may enter now."""
        return self._offered() is not None

    def __len__(self) -> int:
        """Count everybody who waits."""
        return len(self._live)

    def __contains__(self, request: object) -> bool:
        """Tell whether this request waits here."""
        return request in self._live

    def __iter__(self) -> Iterator[Request]:
        """Go through everybody in upstream's order, lanes and gates aside."""
        return (entry.request for entry in sorted(entry for entry, _ in self._live.values()))

    # Inside

    def _push(self, request: Request, number: int) -> None:
        popped = self._popped.pop(request, None)
        if self._excused is not None and request is self._excused[0].request:
            self._place(*self._excused)
            self._forget_offer()
            return
        if popped is not None and number < 0:
            self._turned_away[request] = self._steps
        order = request if self._by_priority else number
        since = self._clock() if popped is None else popped[0]
        lane = self._lanes_of(request)
        # One that was preempted goes in front, where a bound on waits that had run out, or nearly,
        # must not begin anew for all behind it.
        owed = min(since, self._owed_behind(lane, order)) if number < 0 else since
        self._place(Entry(order, request, since, request.num_tokens, owed), lane)
        self._forget_offer()

    def _owed_behind(self, lane: LaneKey, order: Any) -> float:
        heap = self._heaps.get(lane)
        if not heap or heap[0].request not in self._live or not order < heap[0].order:
            return inf
        return heap[0].owed_since

    def _place(self, entry: Entry, lane: LaneKey) -> None:
        heapq.heappush(self._heaps.setdefault(lane, []), entry)
        self._live[entry.request] = (entry, lane)
        self._count(lane, 1, entry.tokens)

    def _drop(self, request: Request) -> None:
        entry, lane = self._live.pop(request)
        self._count(lane, -1, -entry.tokens)

    def _count(self, lane: LaneKey, requests: int, tokens: int) -> None:
        self.here[lane] += requests
        if not self.here[lane]:
            del self.here[lane]
        for counts, name in zip(self.counts, lane, strict=True):
            count = counts[name]
            count.requests += requests
            count.tokens += tokens

    def _count_held(self) -> None:
        for counts in self.counts:
            for count in counts.values():
                count.held = count.barred = 0
        barred: Counter[LaneKey] = Counter()
        if self._turned_away:
            barred.update(self._live[r][1] for r in self._turned_away if r in self._live)
        for lane in self._held_by.keys() | barred.keys():
            by = self._held_by.get(lane)
            for number, (counts, name) in enumerate(zip(self.counts, lane, strict=True)):
                if by is None or by == number:
                    counts[name].barred += barred[lane]
                else:
                    counts[name].held += self.here[lane]

    def _forget_offer(self) -> None:
        self._offer = None
        self._peeked = False

    def _offered(self) -> Request | None:
        self._offers = True
        if self._offer is None and self._live and self._excused is None:
            self._offer = self._choose()
        return self._offer

    def _choose(self) -> Request | None:
        # First everybody in front gets to the lane he belongs to, or is judged by it until a later
        # step has a move for him. Then the fronts are compared: one who moves can become the front
        # of a lane that was looked at before.
        self._strays.clear()
        for lane in tuple(self._heaps):
            self._settle(lane)
        best: tuple[Gate, tuple[float, ...], Any] | None = None
        chosen = None
        for lane, heap in self._heaps.items():
            head = heap[0]
            waited = self._now - head.owed_since
            where = self._strays.get(lane, lane)
            gate = self._gate_of(where, head.request, waited)
            if gate is Gate.CLOSED:
                continue
            place = (gate, self._urgency_of(where, head.request, waited), head.order)
            if best is None or place < best:
                best = place
                chosen = head.request
        return chosen

    def _bury(self, heap: list[Entry]) -> None:
        """Take those who are no longer here from its front."""
        while heap and (
            (live := self._live.get(heap[0].request)) is None or live[0] is not heap[0]
        ):
            heapq.heappop(heap)
            self._dead -= 1

    def _settle(self, lane: LaneKey) -> None:
        """Make the front of this lane one who waits and belongs here, or remove the lane.

        Where the step has no move left, who belongs elsewhere stays and is noted as a stray.
        """
        heap = self._heaps[lane]
        while heap:
            self._bury(heap)
            if not heap:
                break
            entry = heap[0]
            belongs = self._lanes_of(entry.request)
            if belongs == lane:
                return
            if not self._may_move(entry, belongs):
                self._strays[lane] = belongs
                return
            self._moves += 1
            heapq.heappop(heap)
            self._drop(entry.request)
            self._place(entry, belongs)
        del self._heaps[lane]

    def _may_move(self, entry: Entry, belongs: LaneKey) -> bool:
        if self._moves < MOST_MOVES:
            return True
        if self._moves >= MOST_PUT_ASIDE or self._blocks_read() >= MOST_READ:
            return False
        # Who may enter can do so from here; who may not keeps those behind him from it, and so does
        # one for whose kind there was no room.
        if self.refused is not None and self._lanes_of(self.refused) == belongs:
            return True
        waited = self._now - entry.owed_since
        return self._gate_of(belongs, entry.request, waited) is Gate.CLOSED

    def _sweep(self) -> None:
        heaps: dict[LaneKey, list[Entry]] = {}
        for entry, lane in self._live.values():
            heaps.setdefault(lane, []).append(entry)
        for heap in heaps.values():
            heapq.heapify(heap)
        self._heaps = heaps
        self._dead = 0
