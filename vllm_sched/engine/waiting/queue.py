"""A waiting queue of lanes, each with a gate, in the place of vLLM's own.

Upstream's scan takes the head of one queue and stops at the first that does not fit. Here the
requests stand in lanes that the policies name; a lane whose gate is closed costs nothing, however
many wait in it. Among open lanes the most urgent is offered, and of equals the head that upstream
would serve first, so that with all gates open and no urgency the order is upstream's, first come
first served or by priority.

A request that upstream takes and puts back could not begin. It leaves its lane for a while, so that
a step costs the same however many there are: until its LoRA adapter may have a slot, until its
grammar is compiled, or else until its turn among `MAX_RETRIES` of these requests in each step.

Two promises to the scan: what was peeked is what is popped (blocks were allocated for it), and
`len` counts everybody while `bool` tells only whether somebody may enter now.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_sched.engine.waiting.heaps import (
    MAX_DEAD_ENTRIES,
    SET_ASIDE,
    Entry,
    LaneHeaps,
    Place,
)
from vllm_sched.engine.waiting.held import LaneKey
from vllm_sched.policies.types import Gate

# For so many steps one that could not begin is not thought to be able to.
RETRY_STEPS = 8
# In each step so many requests that could not begin are offered again. Upstream's own scan takes
# each of them in each step; here each waits at most a step per MAX_RETRIES requests.
MAX_RETRIES = 64
# Of those who belong elsewhere so many move in a step, at most. A prefix that thousands share can
# be cached from one step to the next.
MOST_MOVES = 32
# Out of the way of those behind them so many, who may not enter themselves, while what was read of
# their prefixes is no more than so many blocks: a prefix that is gone is soon looked up.
MOST_PUT_ASIDE, MOST_READ = 256, 2048


class LaneQueue(LaneHeaps, RequestQueue):
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
        closed_adapter: Callable[[Request], int] = lambda _: 0,
        open_adapters: Callable[[], Collection[int] | None] = lambda: None,
        compiles_grammar: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        super().__init__(num_policies, open_adapters)
        self._by_priority = by_priority
        self._lanes_of = lanes_of
        self._gate_of = gate_of
        self._urgency_of = urgency_of
        self._blocks_read = blocks_read  # of cached prefixes, to tell lanes in this step
        self._clock = clock
        self._closed_adapter = closed_adapter  # 0 if a request may enter with its adapter
        self._compiles_grammar = compiles_grammar
        self._last = 0  # order of the newest at the end
        self._first = 0  # order of the newest at the front
        # Those popped in this step: put back, they have not begun to wait anew.
        self._popped: dict[Request, Place] = {}
        # Those who were popped in the step before and stayed away: since when, and whence.
        self.entered: dict[Request, tuple[float, LaneKey]] = {}
        self._steps = 0
        self._moves = 0  # in this step
        # The lanes, of a group each, whose fronts belong to another that they have yet to move to.
        self._strays: dict[tuple[int, LaneKey], LaneKey] = {}
        self._offer: Request | None = None
        self._peeked = False
        self.refused: Request | None = None  # offered in an earlier step, and found no room
        # The place of the request that a policy gave no tokens in this step.
        self._excused: Place | None = None
        self._offers = False  # whether upstream looked for who enters, in this step
        self.offered = False  # and in the one before

    # What the scheduler does with it around a step

    def begin_step(self, now: float) -> None:
        """Let gates be asked anew."""
        self._now = now
        self._steps += 1
        self._moves = 0
        self._forget_offer()
        if self._aside:
            self._offer_again()
        self.counted.note_waits(self._waits_of_fronts(self._open_groups()))
        self._count_held()
        self.counted.held_by.clear()
        self.offered, self._offers = self._offers, False

    def end_step(self) -> None:
        """Remember a request that was looked at and not taken."""
        if self._peeked and self._offer is not None:
            self.refused = self._offer
        self._excused = None
        self.entered = {r: (place.entry.since, place.lane) for r, place in self._popped.items()}
        self._popped = {}
        if self._turned_away:
            self._turned_away = {
                request: step
                for request, step in self._turned_away.items()
                if self._steps - step < RETRY_STEPS
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
        new: list[Request] = []
        put_back: list[Request] = []
        for request in requests:
            (put_back if request in self._popped else new).append(request)
        # Upstream names first what it took last: requests are set aside in the order of the scan.
        for request in (*new, *reversed(put_back)):
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
        entry, lane, group = self._live[request]
        heapq.heappop(self._heaps[group][lane])  # it is the head: so it came to be offered
        self._drop(request)
        self._turned_away.pop(request, None)
        self._popped[request] = Place(entry, self._strays.get((group, lane), lane), group)
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
                self._dead += self._live[request].group != SET_ASIDE
                self._drop(request)
                self._turned_away.pop(request, None)
            if self.refused is request:
                self.refused = None
        self._forget_offer()
        if self._dead > MAX_DEAD_ENTRIES and self._dead > len(self._live):
            self._sweep()

    def __bool__(self) -> bool:
        """Tell whether somebody may enter now."""
        return self._offered() is not None

    # Inside

    def _push(self, request: Request, number: int) -> None:
        popped = self._popped.pop(request, None)
        self._forget_offer()
        if self._excused is not None and request is self._excused.entry.request:
            self._place(*self._excused)
            return
        if popped is not None and number < 0:
            self._set_aside(popped)
            return
        order = request if self._by_priority else number
        since = self._clock()
        lane = self._lanes_of(request)
        # One that was preempted goes in front, where a bound on waits that had run out, or nearly,
        # must not begin anew for all behind it.
        owed = min(since, self._owed_behind(lane, order)) if number < 0 else since
        self._place(Entry(order, request, since, request.num_tokens, owed), lane)

    def _set_aside(self, popped: Place) -> None:
        """Keep a request that could not begin out of its lane, at the place that it had."""
        entry, lane, _ = popped
        request = entry.request
        if group := self._closed_adapter(request):
            self._place(entry, lane, group)
        elif request.num_preemptions:
            # It waits for results that are under way: for a step or two.
            self._turned_away[request] = self._steps
            self._place(entry, lane)
        else:
            self._aside[request] = None
            self._hold(Place(entry, lane, SET_ASIDE))

    def _offer_again(self) -> None:
        """Put up to MAX_RETRIES requests that could not begin back into their lanes."""
        offered = Counter(self._live[request].lane for request in self._turned_away)
        again: list[Place] = []
        for request in self._aside:
            place = self._live[request]
            # Those that were not looked at since, as behind a closed gate, count too.
            if offered[place.lane] >= MAX_RETRIES or self._compiles_grammar(request):
                continue
            offered[place.lane] += 1
            again.append(place)
            if len(again) == MAX_RETRIES:
                break
        for entry, lane, _ in again:
            self._drop(entry.request)
            self._turned_away[entry.request] = self._steps
            self._place(entry, lane)

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
        groups = self._open_groups()
        for group in groups:
            for lane in tuple(self._heaps[group]):
                self._settle(lane, group)
        best: tuple[Gate, tuple[float, ...], Any] | None = None
        chosen = None
        for group in groups:
            for lane, heap in self._heaps[group].items():
                head = heap[0]
                waited = self._now - head.owed_since
                where = self._strays.get((group, lane), lane) if self._strays else lane
                gate = self._gate_of(where, head.request, waited)
                if gate is Gate.CLOSED:
                    continue
                place = (gate, self._urgency_of(where, head.request, waited), head.order)
                if best is None or place < best:
                    best = place
                    chosen = head.request
        for group in groups[1:]:
            if not self._heaps[group]:
                del self._heaps[group]
                self._sizes.pop(group, None)
        return chosen

    def _settle(self, lane: LaneKey, group: int) -> None:
        """Make the front of this lane one who waits and belongs here, or remove the lane.

        Where the step has no move left, who belongs elsewhere stays and is noted as a stray.
        """
        heap = self._heaps[group][lane]
        while heap:
            self._bury(heap)
            if not heap:
                break
            entry = heap[0]
            belongs = self._lanes_of(entry.request)
            if belongs == lane:
                return
            if not self._may_move(entry, belongs):
                self._strays[group, lane] = belongs
                return
            self._moves += 1
            heapq.heappop(heap)
            self._drop(entry.request)
            self._place(entry, belongs, group)
        del self._heaps[group][lane]

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
