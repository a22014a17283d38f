"""A state machine test of the schedulers' invariants, with vLLM's real classes.

A hypothesis state machine adds, aborts, steps, preempts, pauses and lets time pass. The
asynchronous scheduler has up to two steps in flight, as in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import answer, make_request, make_scheduler
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.policies import registry
from vllm_sched.policies.types import Gate, Policy

BUDGET, CONTEXT = 64, 2000
LONG = 80  # 4 % of the context; prompts of 65 to 80 tokens are medium
MAX_WAIT = 30.0
SHARED = list(range(10, 170))  # a prefix that some prompts share


SETTINGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "static_batching": st.fixed_dictionaries(
        {"size": st.sampled_from([0, 2]), "max_wait_s": st.just(MAX_WAIT)}
    ),
    "prefill_first": st.fixed_dictionaries({"max_pause_s": st.sampled_from([0.03, 5.0])}),
    "lanes": st.fixed_dictionaries(
        {
            "reserve_slots": st.sampled_from([0.0, 0.5]),
            "reserve_kv": st.sampled_from([0.0, 0.5]),
            "batch_share": st.sampled_from([0.25, 1.0]),
            "urgent_max_wait_s": st.sampled_from([1.0, 10.0]),
            "normal_max_wait_s": st.sampled_from([5.0, MAX_WAIT]),
            "batch_max_wait_s": st.sampled_from([15.0, MAX_WAIT]),
        }
    ),
    "long_prompt": st.fixed_dictionaries(
        {
            "max_num_partial_prefills": st.sampled_from([2, 4]),
            "max_long_partial_prefills": st.sampled_from([1, 2]),
            "long_prefill_token_threshold": st.sampled_from([LONG, 200]),
            "long_prefill_share": st.sampled_from(["auto", 0.25, 0.5]),
            "max_wait_s": st.just(MAX_WAIT),
        }
    ),
    "deferred_prefill": st.fixed_dictionaries(
        {
            "departures": st.sampled_from([1, 3, "auto"]),
            "itl_ms": st.sampled_from([None, 5.0, 30.0]),
        }
    ),
    "rotation": st.fixed_dictionaries(
        {"chunk": st.sampled_from([0, 16]), "max_wait_s": st.sampled_from([0.03, 10.0])}
    ),
    "chunk_budget": st.fixed_dictionaries(
        {
            "itl_ms": st.sampled_from([1.0, 15.0, 1000.0]),
            "chunk": st.sampled_from([None, None, 20]),
            "ttft_ms": st.sampled_from([None, 100.0]),
            "min_chunk": st.sampled_from([1, 32]),
        }
    ),
}


LONG_PROMPT_ALONE = st.fixed_dictionaries({"long_prompt": SETTINGS["long_prompt"]})


@st.composite
def policy_sets(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Return any set of policies without conflicts."""
    names = draw(st.sets(st.sampled_from(sorted(SETTINGS)), min_size=1))
    for one, other in registry.CONFLICTS:
        if {one, other} <= names:
            names.discard(draw(st.sampled_from([one, other])))
    return {name: draw(SETTINGS[name]) for name in sorted(names)}


def lane_of(request: Any) -> str:
    return "normal" if not request.priority else "urgent" if request.priority < 0 else "batch"


class Machine(RuleBasedStateMachine):
    """One scheduler and its invariants."""

    kind: type = SyncPolicyScheduler
    depth = 1
    drafts = 0  # maximum per decode
    connector: dict[str, Any] | None = None  # configuration of the KV transfer

    @initialize(
        policies=st.one_of(LONG_PROMPT_ALONE, policy_sets()),
        blocks=st.sampled_from([90, 140, 2000]),
        slots=st.sampled_from([3, 16]),
        priority=st.booleans(),
    )
    def start(
        self, policies: dict[str, dict[str, Any]], blocks: int, slots: int, priority: bool
    ) -> None:
        self.now = 0.0
        self.blocks = blocks
        alone = policies.keys() == {"long_prompt"} and self.connector is None
        self.limits = policies["long_prompt"] if alone else None  # on long prompts
        self.pauses_decodes = "prefill_first" in policies
        self.max_pause_s = policies.get("prefill_first", {}).get("max_pause_s", 0.0)
        self.resets = False
        self.empty_steps = 0
        # Consecutive steps with an overdue request that could enter.
        self.kept_steps = self.kept_long_steps = 0
        self.scheduler: Any = make_scheduler(
            policies,
            scheduler_cls=self.kind,
            async_scheduling=self.depth > 1,
            budget=BUDGET,
            max_model_len=CONTEXT,
            max_num_seqs=slots,
            num_blocks=blocks,
            priority=priority,
            prefix_caching=True,
            connector=self.connector,
        )
        self.scheduler.clock = lambda: self.now
        self.scheduler.waiting._clock = lambda: self.now
        self.scheduler.num_spec_tokens = self.drafts
        self.drafted = 0
        self.alive: dict[str, Any] = {}
        self.waits_since: dict[str, float] = {}
        # As `waits_since`; a preempted request takes over the longest wait of the others.
        self.bound_since: dict[str, float] = {}
        self.left_out_since: dict[str, float] = {}
        self.in_flight: deque[Any] = deque()
        self.waited: dict[Any, float] = {}  # when the step began
        self.passing: set[str] = set()  # chosen before an overdue request, in this step
        self.passed = 0  # consecutive entries of such requests
        if "lanes" in policies:
            self._check_choices(policies["lanes"])
        if "lanes" in policies and not (priority or "prefill_first" in policies):
            self.scheduler._preempt_request = self._check_preemptions(
                self.scheduler._preempt_request
            )
        self.turned_away: set[str] = set()
        ask = self.scheduler._handle_blocked_waiting_request
        self.scheduler._handle_blocked_waiting_request = lambda request: (
            request.request_id not in self.turned_away and ask(request)
        )

    # Events

    @rule(
        tokens=st.one_of(st.integers(1, 90), st.sampled_from([75, 81, 190, 200, 700, 1200])),
        output=st.integers(1, 12),
        shared=st.booleans(),
        priority=st.integers(-1, 2),  # with lanes: urgent, normal, batch
    )
    def add(self, tokens: int, output: int, shared: bool, priority: int) -> None:
        prompt = [*SHARED, *[7] * tokens] if shared else tokens
        self.submit(make_request(prompt, output=output, priority=priority))

    @rule(
        tokens=st.sampled_from([1, 60, 200, 700]),
        priority=st.integers(-1, 1),
        left_ms=st.sampled_from([-50, 20, 3000, 40_000]),
        tpot_ms=st.sampled_from([0.001, 50, 1e9]),
    )
    def add_with_targets(self, tokens: int, priority: int, left_ms: float, tpot_ms: float) -> None:
        targets = {"deadline_ms": left_ms, "tpot_ms": tpot_ms}
        self.submit(make_request(tokens, output=6, priority=priority, extra_args=targets))

    def submit(self, request: Any) -> None:
        self.scheduler.add_request(request)
        self.alive[request.request_id] = request
        self.waits_since[request.request_id] = self.bound_since[request.request_id] = self.now

    def _note_preempted(self, requests: Iterable[Any], waiting: Iterable[Any]) -> None:
        longest = min((self.bound_since[r.request_id] for r in waiting), default=self.now)
        for request in requests:
            self.waits_since[request.request_id] = self.now
            self.bound_since[request.request_id] = longest

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._schedule()
            while len(self.in_flight) >= self.depth:
                self._finish_one()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        # Names depend on earlier runs, so their alphabetical order does too.
        name = data.draw(st.sampled_from([*self.alive]))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.alive.pop(name)

    @rule()
    def preempt_all(self) -> None:
        while self.in_flight:
            self._finish_one()
        self._note_preempted(self.scheduler.running, self.scheduler.waiting)
        self.resets = True
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.resets = False

    @rule(state=st.sampled_from(list(PauseState)), times=st.integers(1, 3))
    def pause_and_resume(self, state: PauseState, times: int) -> None:
        self.scheduler.set_pause_state(state)
        self.step(times)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule(seconds=st.sampled_from([0.01, 1.0, 20.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.integers(1, 90))
    def add_long_answer(self, tokens: int) -> None:
        """Add a request that keeps the engine busy, because an idle engine opens every gate."""
        self.add(tokens, 150, shared=False, priority=1)

    @rule(
        priorities=st.lists(st.integers(-1, 2), min_size=2, max_size=4),
        seconds=st.sampled_from([2.0, 6.0, 16.0]),
    )
    def add_one_after_another(self, priorities: list[int], seconds: float) -> None:
        for priority in priorities:
            self.add(20, 3, shared=False, priority=priority)
            self.now += seconds

    @rule(tokens=st.integers(BUDGET + 1, LONG), mediums=st.integers(1, 3))
    def add_shorts_after_overdue_mediums(self, tokens: int, mediums: int) -> None:
        for _ in range(mediums):
            self.add(tokens, 2, shared=False, priority=0)
        self.now += MAX_WAIT
        self.add(20, 2, shared=False, priority=0)
        self.step(2)

    @precondition(lambda self: len(getattr(self, "turned_away", "x")) == 0 and self.alive)
    @rule(data=st.data())
    def turn_away(self, data: st.DataObject) -> None:
        """Block a request, as without a LoRA slot or while a grammar compiles."""
        names = {r.request_id for r in self.scheduler.waiting}
        if waiting := [name for name in self.alive if name in names]:
            self.turned_away.add(data.draw(st.sampled_from(waiting)))

    @rule()
    def unblock(self) -> None:
        self.turned_away.clear()

    # A step and its checks

    def _schedule(self) -> None:
        scheduler = self.scheduler
        # `running` is rearranged before the step, so order is not checked.
        decodes = [r for r in scheduler.running if not r.is_prefill_chunk and self._has_more(r)]
        begun, was_running = self.now, set(scheduler.running)
        self.waited = {r: begun - self.waits_since[r.request_id] for r in scheduler.waiting}
        places = scheduler.waiting._heaps.places
        self.mediums = {r for r in places if places[r].lane_key[0].startswith("medium")}
        paused, held_kv = scheduler.pause_state, set(scheduler.kv_holding_waiting)
        output = scheduler.schedule()
        tokens = output.num_scheduled_tokens
        assert sum(tokens.values()) <= BUDGET
        assert all(count > 0 for count in tokens.values())

        preempted = was_running - set(scheduler.running)
        bound_since = dict(self.bound_since)
        self._note_preempted(preempted, self.waited)
        if paused == PauseState.PAUSED_ALL:
            assert not tokens
        elif not (preempted or self.pauses_decodes) and len(decodes) <= BUDGET:
            for request in decodes:
                count = tokens.get(request.request_id, 0)
                assert 1 <= count <= 1 + self.drafts, "a decode was left out"

        admitted = [r for r in scheduler.running if r not in was_running]
        new = [r for r in admitted if paused == PauseState.PAUSED_ALL or r not in held_kv]
        assert not (new and paused != PauseState.UNPAUSED)
        if self.limits is not None:
            overdue = {r for r in self.waited if begun - bound_since[r.request_id] >= MAX_WAIT}
            self._check_longs(self.limits, admitted, tokens, overdue)
        self._check_progress(tokens)
        self._check_turns(admitted)
        self.in_flight.append((output, answer(scheduler, output)))
        if paused != PauseState.UNPAUSED:
            self.left_out_since.clear()
            return
        self._check_pauses([r for r in decodes if r in scheduler.running], output, begun)
        if admitted:
            self.kept_steps = 0
        else:
            self._check_waits()

    def _check_progress(self, tokens: Any) -> None:
        # The step after an empty one is not cut by policies. With steps in flight, an empty one can
        # also mean that all last tokens are in flight.
        idle = tokens or self.alive.keys() <= self.turned_away or self.in_flight
        self.empty_steps = 0 if idle or self.scheduler.pause_state else self.empty_steps + 1
        assert self.empty_steps < 2, "steps without anything in them"

    def _check_longs(
        self, limits: dict[str, Any], admitted: list[Any], tokens: Any, overdue: set[Any]
    ) -> None:
        """Check the number of long prompts in prefill, and the bound of their wait."""

        def left_before(request: Any) -> int:
            before = request.num_computed_tokens - tokens.get(request.request_id, 0)
            return int(request.num_tokens - before)

        partial, usual = limits["max_num_partial_prefills"], limits["max_long_partial_prefills"]
        prefills = [r for r in self.scheduler.running if r.is_prefill_chunk or r in admitted]
        # A preempted answer continues at any length.
        threshold = limits["long_prefill_token_threshold"]
        longs = [r for r in prefills if left_before(r) > threshold and not r.num_output_tokens]
        new = [r for r in longs if r in admitted]
        most = max(partial, usual + 1)
        if new:
            limit = most if overdue.intersection(new) else usual
            assert len(longs) <= limit, "more long prefills than the limit"
        self._check_bound(len(prefills) < partial and len(longs) < most)
        if not self.scheduler._policies[0]._longs:
            self._check_full(sum(tokens.values()))
        if self.scheduler.policy == SchedulingPolicy.FCFS and not self.turned_away:
            self._check_mediums(admitted)

    def _check_mediums(self, admitted: list[Any]) -> None:
        """Check that no short passes an overdue medium while no medium is in prefill."""
        queue, waited = self.scheduler.waiting, self.waited
        in_prefill = self.scheduler._policies[0]._mediums._in_prefill
        overdue = [r for r in queue if waited.get(r, 0.0) >= MAX_WAIT and r in self.mediums]
        if not overdue or queue._turned_away or in_prefill - {r.request_id for r in admitted}:
            return
        late = [r for r in admitted if r.num_preemptions or waited.get(r, 0.0) >= MAX_WAIT]
        places = queue.admitted_last_step.values()
        passed = any(place.lane_key[0] == "short" for place in places)
        assert late or not passed, "a short passed an overdue medium"

    def _check_full(self, tokens: int) -> None:
        """Check that a step without longs has no tokens left while others could enter."""
        scheduler, waiting = self.scheduler, list(self.scheduler.waiting)
        counts = scheduler.waiting.lane_counts.by_policy[0]
        others = [lane for lane in counts if counts[lane].requests and not lane.startswith("long")]
        # Results of a preempted request may be in flight.
        idle = self.turned_away or any(r.num_preemptions for r in waiting)
        if others and not idle and scheduler.pause_state == PauseState.UNPAUSED:
            # A decode with its last token in flight keeps a token of the budget.
            unused = BUDGET - tokens > len(scheduler.running)
            assert not (unused and self._has_room(waiting)), "tokens of a step are unused"

    def _check_bound(self, has_place: bool) -> None:
        """Check that no request waits beyond the bound with a place, a slot and room."""
        scheduler, waiting = self.scheduler, self._able()
        counts = scheduler.waiting.lane_counts.by_policy[0]
        kept = (
            has_place
            and scheduler.pause_state == PauseState.UNPAUSED
            # With priorities a request may wait behind better ones without a bound.
            and bool(waiting and self.waited.get(waiting[0], 0.0) >= MAX_WAIT)
            and self._has_room(waiting)
            and not any(count.requests for lane, count in counts.items() if lane[:4] != "long")
        )
        self.kept_long_steps = self.kept_long_steps + 1 if kept else 0
        # A few consecutive steps may be the shorts' only.
        assert self.kept_long_steps <= 5, "a request waits beyond the bound with everything free"

    def _able(self) -> list[Any]:
        """Return the waiting requests that are not blocked."""
        return [r for r in self.scheduler.waiting if r.request_id not in self.turned_away]

    def _has_room(self, waiting: list[Any]) -> bool:
        """Return whether there is a free slot, and KV blocks for each of these requests.

        Prompts in prefill need the rest of their blocks.
        """
        scheduler = self.scheduler
        room = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * 16 - 32
        room -= sum(r.num_tokens - r.num_computed_tokens + 16 for r in scheduler.running)
        is_full = len(scheduler.running) >= scheduler.max_num_active_reqs
        return not is_full and all(r.num_tokens <= room for r in waiting)

    def _check_preemptions(self, preempt: Callable[..., None]) -> Callable[..., None]:
        """Return `preempt` with a check that the victim's class is lowest; a reset preempts all."""
        scheduler = self.scheduler

        def judging(victim: Any, *args: Any, **kwargs: Any) -> None:
            worst = max(map(scheduler._planner.classes.class_of, scheduler.running), default=0.0)
            assert self.resets or scheduler._planner.classes.class_of(victim) >= worst
            preempt(victim, *args, **kwargs)

        return judging

    def _check_choices(self, settings: dict[str, Any]) -> None:
        """Check the bound of each lane at every choice of the queue.

        After its bound, a lane's head is not held by `lanes`, and only other overdue heads pass it,
        or an urgent request beyond its own bound.
        """
        queue = self.scheduler.waiting
        names = [policy.name for policy in self.scheduler._policies]
        number = names.index("lanes")
        lanes = self.scheduler._policies[number]
        rules = queue._rules
        ask, choose = rules.gate_of, queue._choose_offer
        gates: dict[Any, Gate] = {}

        def has_waited(request: Any) -> bool:
            return self.waited.get(request, 0.0) >= settings[f"{lane_of(request)}_max_wait_s"]

        def is_overdue(request: Any) -> bool:
            # The next overdue request of a lane waits until the released one is done.
            released = lanes._overdue.released.get(lane_of(request))
            served = any(r.request_id == released for r in self.scheduler.running)
            return lane_of(request) != "urgent" and has_waited(request) and not served

        def gate_of(lane: Any, head: Any, waited: float) -> Gate:
            gates[head] = gate = ask(lane, head, waited)
            held = queue.lane_counts.held_by.get(lane) == number
            assert not (held and is_overdue(head)), "held beyond the bound of its lane"
            return gate

        def choosing() -> Any:
            gates.clear()
            chosen = choose()
            lanes_of_group = queue._heaps.lanes.values()
            fronts = [heap[0].request for lanes in lanes_of_group for heap in lanes.values()]
            overdue = [r for r in fronts if gates[r] is Gate.OPEN and is_overdue(r)]
            # A preempted request represents the longest wait behind it.
            if overdue and chosen not in overdue and not chosen.num_preemptions:
                patient = lane_of(chosen) == "urgent" and has_waited(chosen)
                assert patient, "an overdue request of a lane was passed"
                self.passing.add(chosen.request_id)
            return chosen

        rules.gate_of, queue._choose_offer = gate_of, choosing

    def _check_turns(self, admitted: list[Any]) -> None:
        """Check that overdue urgent requests and other overdue requests take turns."""
        for request in admitted:
            if request.request_id in self.passing:
                self.passed += 1
            elif lane_of(request) != "urgent":
                self.passed = 0
        self.passing.clear()
        assert self.passed <= 1, "an overdue request was passed by several urgent requests"

    def _check_pauses(self, decodes: list[Any], output: Any, begun: float) -> None:
        """Check that no decode pauses for longer than the bound."""
        out = {r.request_id for r in decodes} - output.num_scheduled_tokens.keys()
        if output.preempted_req_ids:
            # Upstream ends a step when a request preempts itself; later ones are in the next step.
            out &= self.left_out_since.keys()
        self.left_out_since = {name: self.left_out_since.get(name, begun) for name in out}
        for since in self.left_out_since.values():
            assert begun - since < self.max_pause_s, "decodes were paused beyond the bound"

    def _check_waits(self) -> None:
        """Check that no request waits beyond every bound with a slot, room and no prefill."""
        scheduler, waiting = self.scheduler, self._able()
        lanes = next((p for p in scheduler._policies if p.name == "lanes"), None)
        kept = (
            bool(waiting)
            # No lane's bound is longer.
            and all(self.waited.get(r, 0.0) >= MAX_WAIT for r in waiting)
            and self._has_room(waiting)
            and not any(r.is_prefill_chunk for r in scheduler.running)
            # The next overdue request of a lane enters when the released one is done.
            and not (lanes and lanes._overdue.released)
        )
        self.kept_steps = self.kept_steps + 1 if kept else 0
        # A hold of `deferred_prefill` may last for a second: a hundred steps.
        limit = 120 if any(p.name == "deferred_prefill" for p in scheduler._policies) else 20
        assert self.kept_steps <= limit, "a request waits beyond every bound with everything free"

    def _has_more(self, request: Any) -> bool:
        """Return whether a decode has more tokens to make than those in flight."""
        made = request.num_output_tokens + request.num_output_placeholders
        return bool(made < request.max_tokens)

    def _finish_one(self) -> None:
        output, result = self.in_flight.popleft()
        self.now += 0.01 if output.total_num_scheduled_tokens else 0.001
        self.scheduler.update_from_output(output, result)
        for name in [n for n, r in self.alive.items() if r.is_finished()]:
            del self.alive[name]
        if self.drafts:
            self._draft()

    def _draft(self) -> None:
        for request in self.scheduler.running:
            if not request.is_prefill_chunk:
                self.drafted += 1
                request.spec_token_ids = [7] * (self.drafted * 5 % (2 * self.drafts) - self.drafts)

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        scheduler = self.scheduler
        places = [
            *(r.request_id for r in scheduler.running),
            *(r.request_id for r in scheduler.waiting),
            *(r.request_id for r in scheduler.kv_holding_waiting),
        ]
        assert len(places) == len(set(places))
        assert set(places) == set(self.alive)
        assert scheduler.get_request_counts() == (
            len(scheduler.running),
            len(self.alive) - len(scheduler.running),
        )
        lanes = scheduler.waiting.lane_counts.by_policy[0].values()
        assert sum(lane.requests for lane in lanes) == len(scheduler.waiting)
        # A step in flight may add a token to a waiting preempted request.
        late = sum(r.num_tokens for r in scheduler.waiting) - sum(lane.tokens for lane in lanes)
        preempted = sum(r.num_preemptions > 0 for r in scheduler.waiting)
        assert 0 <= late <= (self.depth - 1) * preempted

    @invariant()
    def cached_classes_are_current(self) -> None:
        """Check the cached classes of decodes against the policy."""
        scheduler = self.scheduler
        classes = scheduler._planner.classes
        if classes.policy is None:
            return
        known = classes._decode_classes
        assert known.keys() <= {*scheduler.requests.values()}
        if classes.policy.class_changes == classes._class_changes:
            decoding = [r for r in scheduler.running if not r.is_prefill_chunk and r in known]
            assert [known[r] for r in decoding] == [classes.class_of(r) for r in decoding]

    @invariant()
    def held_reasons_are_declared(self) -> None:
        """Metrics show each declared reason from the start."""
        counts = self.scheduler.waiting.lane_counts.by_policy
        for policy, lanes in zip(self.scheduler._policies, counts, strict=True):
            if type(policy).held_reason is not Policy.held_reason:
                assert {policy.held_reason(lane) for lane in lanes} <= {*policy.held_reasons}

    def _has_work(self) -> bool:
        return bool(self.alive)

    def teardown(self) -> None:
        """Finish all requests, without empty steps, and check that figures are finite."""
        if not hasattr(self, "scheduler"):
            return
        self.turned_away.clear()
        usable = (self.blocks - 1) * 16
        for name in [n for n, r in self.alive.items() if r.num_prompt_tokens + 13 > usable]:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.alive.pop(name)
        # Batches of two, or slots of three, serve many long answers for thousands of steps.
        tokens = sum(r.num_prompt_tokens + r.max_tokens for r in self.alive.values())
        for _ in range(3000 + tokens):
            if not self._has_work():
                break
            self._schedule()
            while len(self.in_flight) >= self.depth or (
                self.in_flight and not self.scheduler.has_unfinished_requests()
            ):
                self._finish_one()
        while self.in_flight:
            self._finish_one()
        assert not self.alive, "requests that never finish"
        assert self.scheduler.kv_cache_manager.usage == 0
        for policy in self.scheduler._policies:
            for value in (*policy.gauges().values(), *policy.counters().values()):
                assert 0 <= value < float("inf")


class AsyncMachine(Machine):
    """The same with two steps in flight."""

    kind = PolicyScheduler
    depth = 2


class DraftedMachine(Machine):
    """The same with drafts in about half of the steps."""

    drafts = 4


@pytest.mark.parametrize("machine", [Machine, AsyncMachine, DraftedMachine])
def test_invariants_hold_in_any_order_of_events(machine: type[RuleBasedStateMachine]) -> None:
    run(machine, max_examples=60)


def run(machine: type[RuleBasedStateMachine], max_examples: int = 40) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            # No shrinking, because it takes minutes.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
