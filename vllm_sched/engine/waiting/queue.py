"""A waiting queue of lanes with gates, in place of vLLM's own.

Policies put each request into a lane. The most urgent head of the open lanes is next; vLLM's order
breaks ties. A closed lane costs nothing, however many requests it holds.

A request that cannot begin, which vLLM pops and puts back, leaves its lane until a LoRA slot is
free, its grammar is compiled, or its turn comes among `MAX_RETRIES` per step.

`pop_request` must return the request that was peeked: blocks were allocated for it. `len` counts
all requests; `bool` is False if no request may enter now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Any, Protocol

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_sched.engine.waiting.heaps import SET_ASIDE, Entry, LaneHeaps, Place
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.policies.types import Gate

# Steps for which a request that could not begin counts as unable to.
RETRY_STEPS = 8
# Such requests offered again in a step.
MAX_RETRIES = 64
# Lane changes in a step. Thousands may share a prefix that becomes cached.
MAX_MOVES = 32
# Limits for requests that block their lane: a prefix that left the cache is cheap to look up.
MAX_BLOCKING_MOVES, MAX_BLOCKS_READ = 256, 2048


class LaneRules(Protocol):
    def lane_key_of(self, request: Request) -> LaneKey:
        """Return the lanes of a request, by policy."""

    def gate_of(self, lane_key: LaneKey, head: Request, waited: float) -> Gate:
        """Return the gate of a lane."""

    def urgency_of(self, lane_key: LaneKey, head: Request, waited: float) -> tuple[float, ...]:
        """Return the urgency of a lane; the least is served first."""

    has_deadlines: bool

    def deadline(self, request: Request, since: float) -> float:
        """Return when a request that waits since then should enter."""

    def adapter_without_slot(self, request: Request) -> int:
        """Return the request's LoRA adapter if it has no slot, else 0."""

    def open_adapters(self) -> Collection[int] | None:
        """Return the LoRA adapters with a slot; None for all."""

    def awaits_grammar(self, request: Request) -> bool: ...

    def blocks_read(self) -> int:
        """Return the blocks of prefixes read in this step."""


class LaneQueue(RequestQueue):
    def __init__(
        self, rules: LaneRules, *, by_priority: bool, clock: Callable[[], float], num_policies: int
    ) -> None:
        self._heaps = LaneHeaps(num_policies, rules.open_adapters)
        self.lane_counts = self._heaps.counts
        self._rules = rules
        self._by_priority = by_priority
        self._clock = clock
        self._last_number = 0  # of added requests
        self._first_number = 0  # of requests put back, negative
        self._now = 0.0  # when the step began
        # Popped in this step. A request that is put back keeps its place.
        self._popped: dict[Request, Place] = {}
        self.admitted_last_step: dict[Request, Place] = {}
        self._steps = 0
        self._moves = 0  # in this step
        # The step in which a request in its lane could not begin.
        self._turned_away: dict[Request, int] = {}
        # The right lane of heads that could not move, by group and present lane.
        self._strays: dict[tuple[int, LaneKey], LaneKey] = {}
        self._offer: Request | None = None
        self._peeked = False
        self.kv_blocked: Request | None = None  # found no room in an earlier step
        # Given no tokens by a policy in this step.
        self._without_tokens: Place | None = None
        self._was_scanned = False  # vLLM looked for a request in this step
        self.was_scanned_last_step = False  # in the step before

    # Around a step

    def begin_step(self, now: float) -> None:
        self._now = now
        self._steps += 1
        self._moves = 0
        self._forget_offer()
        if self._heaps.set_aside:
            self._return_to_lanes()
        self._heaps.update_waits(now)
        self._heaps.update_held(self._turned_away)
        self.lane_counts.held_by.clear()
        self.was_scanned_last_step, self._was_scanned = self._was_scanned, False

    def end_step(self) -> None:
        if self._peeked and self._offer is not None:
            self.kv_blocked = self._offer
        self._without_tokens = None
        self.admitted_last_step, self._popped = self._popped, {}
        if self._turned_away:
            self._turned_away = {
                request: step
                for request, step in self._turned_away.items()
                if self._steps - step < RETRY_STEPS
            }

    def stop_scan(self) -> None:
        """Note that a policy gave the offered request no tokens, and end the scan."""
        self._peeked = False
        if self._offer is not None:
            self._turned_away.pop(self._offer, None)  # it can begin
            self._without_tokens = self._heaps.places[self._offer]

    def may_begin(self, request: Request) -> bool:
        """Return whether the request was not turned away lately."""
        return request not in self._turned_away

    def recount_held(self) -> None:
        self.next_request()
        self._heaps.update_held(self._turned_away)

    def next_request(self) -> Request | None:
        return self._offer or (self._choose_offer() if self._heaps.places else None)

    def head_waits(self) -> Iterator[tuple[LaneKey, float]]:
        """Return the waits of heads, and of requests set aside."""
        for lane_key, entry in self._heaps.heads(self._heaps.lanes):
            yield lane_key, self._now - entry.gate_since
        for request in self._heaps.set_aside:
            entry, lane_key, _ = self._heaps.places[request]
            yield lane_key, self._now - entry.gate_since

    # Overrides

    def __len__(self) -> int:
        return len(self._heaps.places)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._heaps)

    def __contains__(self, request: object) -> bool:
        return request in self._heaps.places

    def add_request(self, request: Request) -> None:
        self._last_number += 1
        self._push(request, self._last_number)

    def prepend_request(self, request: Request) -> None:
        self._first_number -= 1
        self._push(request, self._first_number)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        new: list[Request] = []
        put_back: list[Request] = []
        for request in requests:
            (put_back if request in self._popped else new).append(request)
        # vLLM lists the last popped request first; keep the order of the scan.
        for request in (*new, *reversed(put_back)):
            self.prepend_request(request)

    def peek_request(self) -> Request:
        offer = self._current_offer()
        if offer is None:
            raise IndexError("peek from a queue without an open lane")
        self._peeked = True
        return offer

    def pop_request(self) -> Request:
        request = self._current_offer()
        if request is None:
            raise IndexError("pop from a queue without an open lane")
        entry, lane_key, group = self._heaps.pop(request)
        self._turned_away.pop(request, None)
        self._popped[request] = Place(entry, self._strays.get((group, lane_key), lane_key), group)
        if self.kv_blocked is request and self._without_tokens is None:
            self.kv_blocked = None
        self._forget_offer()
        return request

    def remove_request(self, request: Request) -> None:
        if request not in self:
            raise ValueError(f"request {request.request_id} is not waiting")
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests; absent ones are ignored."""
        for request in requests:
            if request in self._heaps.places:
                self._heaps.remove(request)
                self._turned_away.pop(request, None)
            if self.kv_blocked is request:
                self.kv_blocked = None
        self._forget_offer()

    def __bool__(self) -> bool:
        """Return whether a request may enter now."""
        return self._current_offer() is not None

    def _push(self, request: Request, number: int) -> None:
        popped = self._popped.pop(request, None)
        self._forget_offer()
        # vLLM 0.33 pops a request without tokens and puts it back.
        if self._without_tokens is not None and request is self._without_tokens.entry.request:
            self._heaps.add(self._without_tokens)
            return
        if popped is not None and number < 0:
            self._set_aside(popped)
            return
        since = self._clock()
        # A preempted request goes first.
        deadline = self._rules.deadline(request, since) if number > 0 else -inf
        order = request if self._by_priority else (deadline, number)
        lane_key = self._rules.lane_key_of(request)
        gate_since = since
        if number < 0:  # behind a preempted head, longer waits must still count
            gate_since = min(since, self._heaps.gate_since_behind(lane_key, order))
        self._heaps.add(
            Place(Entry(order, request, since, request.num_tokens, gate_since), lane_key)
        )

    def _set_aside(self, popped: Place) -> None:
        entry, lane_key, _ = popped
        request = entry.request
        if adapter := self._rules.adapter_without_slot(request):
            self._heaps.add(Place(entry, lane_key, adapter))
        elif request.num_preemptions:
            # Its results are in flight for a step or two.
            self._turned_away[request] = self._steps
            self._heaps.add(Place(entry, lane_key))
        else:
            self._heaps.add(Place(entry, lane_key, SET_ASIDE))

    def _return_to_lanes(self) -> None:
        """Put requests that were set aside back into their lanes."""
        places = self._heaps.places
        offered = Counter(places[request].lane_key for request in self._turned_away)
        returning: list[Request] = []
        for request in self._heaps.set_aside:
            lane_key = places[request].lane_key
            if offered[lane_key] >= MAX_RETRIES or self._rules.awaits_grammar(request):
                continue
            offered[lane_key] += 1
            returning.append(request)
            if len(returning) == MAX_RETRIES:
                break
        for request in returning:
            entry, lane_key, _ = self._heaps.pop(request)
            self._turned_away[request] = self._steps
            self._heaps.add(Place(entry, lane_key))

    def _forget_offer(self) -> None:
        self._offer = None
        self._peeked = False

    def _current_offer(self) -> Request | None:
        self._was_scanned = True
        if self._offer is None and self._heaps.places and self._without_tokens is None:
            self._offer = self._choose_offer()
        return self._offer

    def _choose_offer(self) -> Request | None:
        # A move can change any head, so compare heads after all moves.
        self._strays.clear()
        groups = self._heaps.open_groups()
        for group in groups:
            for lane_key in tuple(self._heaps.lanes[group]):
                self._move_strays(group, lane_key)
        best: tuple[Gate, tuple[float, ...], Any] | None = None
        chosen = None
        for group in groups:
            for lane_key, heap in self._heaps.lanes[group].items():
                head = heap[0]
                waited = self._now - head.gate_since
                right_key = (
                    self._strays.get((group, lane_key), lane_key) if self._strays else lane_key
                )
                gate = self._rules.gate_of(right_key, head.request, waited)
                if gate is Gate.CLOSED:
                    continue
                urgency = self._rules.urgency_of(right_key, head.request, waited)
                if best is None or (gate, urgency, head.order) < best:
                    best = (gate, urgency, head.order)
                    chosen = head.request
        self._heaps.drop_empty_groups(groups)
        return chosen

    def _move_strays(self, group: int, lane_key: LaneKey) -> None:
        """Move heads that belong to another lane, and note a stray that may not move."""
        while (head := self._heaps.head(group, lane_key)) is not None:
            if self._rules.has_deadlines and self._put_back_if_late(head, group, lane_key):
                continue
            right_key = self._rules.lane_key_of(head.request)
            if right_key == lane_key:
                return
            if not self._may_move(head, right_key):
                self._strays[group, lane_key] = right_key
                return
            self._moves += 1
            self._heaps.pop(head.request)
            self._heaps.add(Place(head, right_key, group))
        del self._heaps.lanes[group][lane_key]

    def _put_back_if_late(self, head: Entry, group: int, lane_key: LaneKey) -> bool:
        """Move a head behind requests that can still be on time, once it is late itself."""
        if self._by_priority or head.order[0] >= self._now:
            return False
        due, number = head.order
        deadline = self._rules.deadline(head.request, head.since)
        if number < 0 or deadline <= due:
            return False
        self._heaps.reorder_head(group, lane_key, (deadline, number))
        return True

    def _may_move(self, head: Entry, right_key: LaneKey) -> bool:
        if self._moves < MAX_MOVES:
            return True
        if self._moves >= MAX_BLOCKING_MOVES or self._rules.blocks_read() >= MAX_BLOCKS_READ:
            return False
        # An open head can enter from here. A held or refused head blocks its lane.
        if self.kv_blocked is not None and self._rules.lane_key_of(self.kv_blocked) == right_key:
            return True
        waited = self._now - head.gate_since
        return self._rules.gate_of(right_key, head.request, waited) is Gate.CLOSED
