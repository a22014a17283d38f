"""Which waiting requests may enter a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.prefix_lookups import PrefixCacheLookups
from vllm_sched.engine.steps.slots import admits_requests
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.engine.waiting.lora_slots import LoraSlots
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.types import Gate

AWAITS_GRAMMAR: Final = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
# The look-up of an enum's member takes as long as a gate.
OPEN, CLOSED = Gate.OPEN, Gate.CLOSED


class Admission:
    """The waiting queue, with the rules of the policies."""

    def __init__(
        self,
        scheduler: Scheduler,
        hooks: PolicyHooks,
        prefixes: PrefixCacheLookups,
        *,
        num_policies: int,
        clock: Callable[[], float],
        record_gate: Callable[[LaneKey, int | None], None],
    ) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._prefixes = prefixes
        self._num_policies = num_policies
        self._record_gate = record_gate
        # Of waiting requests; None between steps.
        self._lane_keys_in_step: dict[str, LaneKey] | None = None
        self._num_running = 0  # requests in `running` that the policies know
        self.has_deadlines = bool(hooks.deadline)
        self._idle = False  # nothing runs or loads KV: every gate is open
        lora = scheduler.lora_config
        self.lora_slots = None if lora is None else LoraSlots(lora.max_loras)
        self.queue = LaneQueue(
            self,
            by_priority=scheduler.policy == SchedulingPolicy.PRIORITY,
            clock=clock,
            num_policies=num_policies,
        )

    def begin_step(self, now: float) -> None:
        scheduler = self._scheduler
        running = scheduler.running
        self._lane_keys_in_step = {}
        self._prefixes.begin_step(now)
        self._num_running = len(running)
        if self.lora_slots is not None:
            self.lora_slots.begin_step(running, now)
        self.queue.begin_step(now)
        # Streaming sessions hold KV blocks while they wait for input, which may never come.
        asleep = scheduler.num_waiting_for_streaming_input
        self._idle = not running and len(scheduler.kv_holding_waiting) <= asleep

    def end_step(self) -> None:
        self._lane_keys_in_step = None
        self.queue.end_step()

    def next_to_enter(self) -> Request | None:
        """Return the next request to admit, the KV cache aside."""
        if not admits_requests(self._scheduler):
            return None
        choice: Request | None = self.queue.next_request()
        if choice is None or self.adapter_without_slot(choice):
            return None
        return choice if self.queue.may_begin(choice) else None

    def recount_held(self) -> None:
        """Count the held requests of each lane, unless the counts are recent."""
        # Counts are recent if vLLM looked for a request in the last step. With a single policy
        # that has gates, no other policy holds a request.
        if (
            len(self._hooks.gate) > 1
            and not self.queue.was_scanned_last_step
            and admits_requests(self._scheduler)
        ):
            self.queue.recount_held()

    def skip_without_adapter(self, request: Request) -> bool:
        """Return whether a request with KV blocks, which has no lane, lacks a LoRA slot."""
        if (slots := self.lora_slots) is None or not self.adapter_without_slot(request):
            return False
        slots.record_skip(request)
        return True

    def record_admissions(self) -> None:
        running = self._scheduler.running
        if len(running) == self._num_running:
            return
        for request in running[self._num_running :]:
            for admitted in self._hooks.admitted:
                admitted(request)
            if self.lora_slots is not None:
                self.lora_slots.record_admission(request)
        self._num_running = len(running)

    def lane_key_of(self, request: Request) -> LaneKey:
        # The queue asks often. Lanes that do not depend on the prefix cache hold for the step.
        keys_in_step = self._lane_keys_in_step
        if keys_in_step is not None:
            lane_key = keys_in_step.get(request.request_id)
            if lane_key is not None:
                return lane_key
        looked_up = False

        def cached() -> int:
            nonlocal looked_up
            looked_up = True
            return self._prefixes.cached_tokens(request)

        names = [""] * self._num_policies
        for number, lane in self._hooks.lane:
            names[number] = lane(request, cached)
        lane_key = tuple(names)
        if keys_in_step is not None and not looked_up:
            keys_in_step[request.request_id] = lane_key
        return lane_key

    def gate_of(self, lane_key: LaneKey, head: Request, waited: float) -> Gate:
        running = self._scheduler.running
        if len(running) != self._num_running:
            self.record_admissions()
        strictest, closed_by = OPEN, None
        # A request that began to load KV in this step does not run yet.
        if not self._idle or running or self._scheduler._inflight_prefills:
            strictest, closed_by = self._ask_policies(lane_key, head, waited)
        self.queue.lane_counts.record_gate(lane_key, closed_by)
        self._record_gate(lane_key, closed_by)
        return strictest

    def _ask_policies(
        self, lane_key: LaneKey, head: Request, waited: float
    ) -> tuple[Gate, int | None]:
        """Return the strictest gate, and the policy that holds the head."""
        strictest = OPEN
        for number, gate in self._hooks.gate:
            if (decision := gate(lane_key[number], head, waited)) is CLOSED:
                return CLOSED, number
            if decision is not OPEN:
                strictest = decision
        for number, keeps_lane in self._hooks.keeps_lane:
            if not keeps_lane(lane_key[number], head):
                return CLOSED, None  # it will move to its new lane
        return strictest, None

    def urgency_of(self, lane_key: LaneKey, head: Request, waited: float) -> tuple[float, ...]:
        return tuple(
            urgency(lane_key[number], head, waited) for number, urgency in self._hooks.urgency
        )

    def deadline(self, request: Request, since: float) -> float:
        return max((deadline(request, since) for deadline in self._hooks.deadline), default=since)

    def adapter_without_slot(self, request: Request) -> int:
        if (slots := self.lora_slots) is None:
            return 0
        self.record_admissions()
        return slots.adapter_without_slot(request)

    def open_adapters(self) -> Collection[int] | None:
        if (slots := self.lora_slots) is None:
            return None
        self.record_admissions()
        return slots.open_adapters()

    def awaits_grammar(self, request: Request) -> bool:
        if request.status is not AWAITS_GRAMMAR:
            return False
        grammar = request.structured_output_request
        return grammar is not None and not grammar.is_grammar_ready

    def blocks_read(self) -> int:
        return self._prefixes.blocks_read
