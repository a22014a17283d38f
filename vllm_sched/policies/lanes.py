"""Lanes for urgent, normal and batch requests in one engine.

Idea: urgent requests enter first. Batch requests enter while no other request waits, and leave
slots and KV blocks free. Prefill is in the order of the lanes; an urgent newcomer gets up to half
of a step, and batch prompts a share. A request's lane is `"vllm_xargs": {"lane": "batch"}`, else
its `priority`: below 0 is urgent, above 0 is batch. In a lane the earliest deadline goes first; a
request without one, or too late for it, has `max_wait_s`. After `max_wait_s` the head of a lane
goes first, one request per lane at a time, in turns with urgent requests that wait too long.
Source: classes of service (Llumnix, QLM) and Borg's batch tier.
Cost per step: O(running prefills).
How it fails: a running batch request keeps its slot. An urgent prompt waits for the step in
progress; add `long_prompt` or `chunk_budget`. Clients may call every request urgent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.service_classes.overdue import OverdueTurns
from vllm_sched.policies.service_classes.running import RunningLanes
from vllm_sched.policies.service_classes.shares import NO_LIMIT, StepShares
from vllm_sched.policies.targets import targets_in
from vllm_sched.policies.types import (
    BEFORE_FIRST_STEP,
    FIRST_CLASS,
    NO_REQUESTS,
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

URGENT, NORMAL, BATCH = LANES = ("urgent", "normal", "batch")
LANE_PLACES: Final = {lane: FIRST_CLASS + place for place, lane in enumerate(LANES)}
# Ranks before all lanes; TURN is an urgent request's turn between overdue requests.
OVERDUE: Final = -1.0
URGENT_TURN: Final = -2.0


class LanesSettings(Settings):
    reserve_slots: float = Field(0.125, ge=0, le=1)
    """share of the slots that batch leaves free; raise it if chats wait for a slot"""
    batch_share: float = Field(0.125, gt=0, le=1)
    """share of a step's budget for batch next to other lanes; lower it if chats' streams stutter"""
    normal_max_wait_s: float = Field(30.0, gt=0)
    """wait after which a normal request goes before urgent ones; lower it if clients call too
    many requests urgent"""
    batch_max_wait_s: float = Field(300.0, gt=0)
    """wait after which a batch request goes before all others; lower it if batch must make
    progress under full load"""
    reserve_kv: float = Field(0.1, ge=0, le=1)
    """former: leave it out; batch then leaves a tenth of the KV cache free"""
    recent_s: float = Field(5.0, ge=0)
    """former: leave it out; batch_share then applies for 5 s after other requests"""
    urgent_max_wait_s: float = Field(10.0, gt=0)
    """former: leave it out; urgent requests then take turns after 10 s of wait"""


class Lanes(Policy):
    name: ClassVar[str] = "lanes"
    settings_type: ClassVar[type[Settings]] = LanesSettings
    held_reasons = ("others_wait", "others_prefill", "reserve")
    settings: LanesSettings
    sorts_running = True
    has_classes = True
    class_changes: int = 0

    def __init__(self, facts: EngineFacts, settings: LanesSettings) -> None:
        super().__init__(facts, settings)
        # Urgent requests take turns instead.
        bounds_s = math.inf, settings.normal_max_wait_s, settings.batch_max_wait_s
        self.max_wait_s = dict(zip(LANES, bounds_s, strict=True))
        self._reserved_slots = math.ceil(settings.reserve_slots * facts.max_num_seqs)
        self._requested_lanes: dict[str, str] = {}  # lanes that clients asked for
        self._time_to_deadline_s: dict[str, float] = {}  # on arrival
        self._unknown_lanes = 0  # requests that asked for a lane that does not exist
        self._running = RunningLanes(LANES)
        self._overdue = OverdueTurns(self.max_wait_s, self._running)
        self._urgents_turn = False  # an overdue request entered after the last urgent one
        self._others_seen_at = -math.inf  # last time that urgent or normal requests were present

        # Of the current step.
        self._step = BEFORE_FIRST_STEP
        self._lane_counts: Mapping[str, LaneCount] = {}
        self._free_slots = facts.max_num_seqs
        self._kv_free = 1.0
        self._others_in_prefill = False
        self._shares = StepShares(facts.max_num_batched_tokens)

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(ignored=True)

    def arrived(self, request: RequestView, extra_args: Mapping[str, object]) -> None:
        lane = extra_args.get("lane")
        if isinstance(lane, str) and lane in LANE_PLACES:
            self._requested_lanes[request.request_id] = lane
        elif lane is not None:
            self._unknown_lanes += 1  # too late to refuse the request; its priority applies
        if (left_s := targets_in(extra_args).left_s) is not None:
            self._time_to_deadline_s[request.request_id] = left_s

    def deadline(self, request: RequestView, since: float) -> float:
        return since + self._may_wait_s(request, self._step.now - since)

    def _may_wait_s(self, request: RequestView, waited: float) -> float:
        """Return the lane's longest wait, or the time to an earlier deadline that is not missed."""
        longest_s = self.max_wait_s[self.lane(request)]
        if longest_s == math.inf:
            longest_s = self.settings.urgent_max_wait_s
        left_s = self._time_to_deadline_s.get(request.request_id, longest_s)
        return longest_s if left_s < waited else min(left_s, longest_s)

    def lane(self, request: RequestView, cached: Callable[[], int] | None = None) -> str:
        if (requested := self._requested_lanes.get(request.request_id)) is not None:
            return requested
        if request.priority < 0:
            return URGENT
        return BATCH if request.priority else NORMAL

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._step, self._lane_counts = step, lanes
        self._overdue.begin_step()
        self._free_slots, self._kv_free = step.free_slots, step.kv_free
        if len(self._running.requests) > step.num_running:
            running = (*step.prefills, *step.decoding)
            self._running.discard_all_except({request.request_id for request in running})
        counts = self._running.counts
        if self._others_wait() or counts[URGENT] or counts[NORMAL]:
            self._others_seen_at = step.now
        alone = step.now - self._others_seen_at > self.settings.recent_s
        share = 1.0 if alone else self.settings.batch_share
        self._others_in_prefill = any(self.lane(request) != BATCH for request in step.prefills)
        self._shares = StepShares(max(int(share * step.budget), 1))

    def _others_wait(self) -> bool:
        # Requests that the engine cannot start do not hold batch.
        counts = (self._lane_counts.get(lane, NO_REQUESTS) for lane in (URGENT, NORMAL))
        return any(count.num_startable for count in counts)

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold batch while other lanes wait or prefill, or if only the reserve is free."""
        if lane != BATCH or self._overdue.check_head(lane, head, waited):
            return Gate.OPEN
        held = self._others_in_prefill or self._others_wait() or not self._has_room(head)
        return Gate.CLOSED if held else Gate.OPEN

    def _has_room(self, head: RequestView) -> bool:
        # Without a free slot, about the next slot.
        enough_slots = max(self._free_slots, 1) > self._reserved_slots
        kv_left = self._kv_free - self.facts.kv_share(head)
        return enough_slots and kv_left >= self.settings.reserve_kv

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Return the lane's place, or a rank before all lanes."""
        if lane == URGENT and self._urgents_turn and waited >= self.settings.urgent_max_wait_s:
            return URGENT_TURN
        if self._overdue.check_head(lane, head, waited):
            return OVERDUE
        if not self._time_to_deadline_s:
            return LANE_PLACES[lane]
        left_s = max(self._may_wait_s(head, waited) - waited, 0.0)
        return LANE_PLACES[lane] + left_s / (1.0 + left_s)

    def admitted(self, request: RequestView) -> None:
        request_id, lane = request.request_id, self.lane(request)
        # With remote KV, a request decodes at once.
        if lane != BATCH and request.num_tokens - request.num_computed_tokens > 1:
            self._others_in_prefill = True
        if lane == URGENT:
            self._urgents_turn = False
        elif self._overdue.goes_first(request_id):
            self._urgents_turn = True
            self.class_changes += self._overdue.record_admission(lane, request_id)
        self._running.add(request_id, lane, self._step.now)
        self._free_slots -= 1
        self._kv_free -= self.facts.kv_share(request)

    def departed(self, request: RequestView, now: float) -> None:
        request_id = request.request_id
        self.class_changes += self._overdue.record_departure(self.lane(request), request_id)
        self._requested_lanes.pop(request_id, None)
        self._time_to_deadline_s.pop(request_id, None)
        self._running.discard(request_id)

    def service_class(self, request: RequestView) -> float:
        """Return the lane's place, or the first one for an overdue request."""
        lane, overdue = self.lane(request), False
        if (running := self._running.requests.get(request.request_id)) is not None:
            # Only prefill can be overdue: outputs may take as long.
            in_prefill = request.num_tokens - request.num_computed_tokens > 1
            overdue = in_prefill and self._step.now - running.admitted_at >= self.max_wait_s[lane]
        return LANE_PLACES[URGENT if overdue or self._is_released(request) else lane]

    def rank(self, request: RequestView) -> float:
        place = self.service_class(request)
        return place if place == LANE_PLACES[self.lane(request)] else OVERDUE

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        shares = self._shares
        shares.begin_chunk()
        if self._is_released(request):
            left = shares.remaining("overdue", self._share_of_overdue)
            tokens = shares.charge("overdue", min(tokens, left))
        elif self.lane(request) == BATCH:
            return self._chunk_of_batch(request, tokens)
        return self._chunk_of_others(request, tokens)

    def _chunk_of_batch(self, request: RequestView, tokens: int) -> int:
        enters_first = self._overdue.will_be_released(request.request_id)
        if enters_first or self.rank(request) < LANE_PLACES[BATCH]:
            return tokens
        left = self._shares.remaining("batch", self._share_of_batch)
        return self._shares.charge("batch", min(tokens, left))

    def _chunk_of_others(self, request: RequestView, tokens: int) -> int:
        shares = self._shares
        if request.request_id not in self._running.requests:
            return tokens  # a newcomer
        left = shares.remaining("others", self._limit_others)
        better, worse = shares.limited_ranks
        is_limited = better < self.rank(request) < worse
        return shares.charge("others", min(tokens, left) if is_limited else tokens)

    def taken_back(self, request: RequestView, tokens: int) -> None:
        self._shares.take_back(tokens)

    def _is_released(self, request: RequestView) -> bool:
        return self._overdue.released.get(self.lane(request)) == request.request_id

    def _share_of_batch(self) -> int:
        step = self._step
        if self._others_in_prefill or self._other_newcomer() is not None:
            return 0
        # While decodes pause for the prompt, it gets the whole step.
        paused = step.decoding and not step.decode_tokens
        return step.budget if paused else self._shares.batch_share

    def _other_newcomer(self) -> RequestView | None:
        head = self._step.newcomer()
        return None if head is None or self.lane(head) == BATCH else head

    def _share_of_overdue(self) -> int:
        """Leave other urgent and normal prompts what they can use, up to half of the step."""
        step = self._step
        room = max(step.budget - step.decode_tokens, 1)
        others = sum(
            request.num_tokens - request.num_computed_tokens
            for request in step.prefills
            if self.lane(request) != BATCH and self.rank(request) != OVERDUE
        )
        if (head := self._other_newcomer()) is not None:
            others += step.tokens_left(head)
        return room - min(others, room // 2) if others else NO_LIMIT

    def _limit_others(self) -> int:
        """Leave a newcomer of a better rank what it can use, up to half of the step.

        Prefills run before newcomers. Later policies may not let the newcomer use its part. Sets
        the ranks that are limited, and returns the tokens for all other running prefills.
        """
        step = self._step
        is_better = any(
            count.requests and (lane == URGENT or count.waited >= self.max_wait_s[lane])
            for lane, count in self._lane_counts.items()
        )
        if not is_better or (head := step.newcomer()) is None:
            return NO_LIMIT
        lane = self.lane(head)
        if lane == URGENT:
            self._shares.limited_ranks = LANE_PLACES[URGENT], math.inf
        elif self._overdue.will_be_released(head.request_id):
            self._shares.limited_ranks = OVERDUE, LANE_PLACES[lane]
        room = max(step.budget - step.decode_tokens, 0)
        return room - min(step.tokens_left(head), room // 2)

    def gauges(self) -> Mapping[str, float]:
        counts = self._running.counts
        return {f"running_{lane}": float(counts[lane]) for lane in LANES} | {
            f"waiting_{lane}": float(self._lane_counts.get(lane, NO_REQUESTS).requests)
            for lane in LANES
        }

    def counters(self) -> Mapping[str, float]:
        releases, unknown = float(self._overdue.releases), float(self._unknown_lanes)
        return {"starvation_releases": releases, "unknown_lanes": unknown}

    def held_reason(self, lane: str) -> str:
        if self._others_wait():
            return "others_wait"
        return "others_prefill" if self._others_in_prefill else "reserve"
