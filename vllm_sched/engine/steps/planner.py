"""Shows each step to the policies before vLLM schedules it, and records what it scheduled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine import policy_setup
from vllm_sched.engine.in_flight import ScheduledStep, chunks_of
from vllm_sched.engine.steps.admission import Admission
from vllm_sched.engine.steps.block_chunks import BlockChunks
from vllm_sched.engine.steps.budget import StepBudget
from vllm_sched.engine.steps.chunks import StepChunks
from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.pauses import DecodePauses
from vllm_sched.engine.steps.plan import StepLimit, StepPlan
from vllm_sched.engine.steps.prefix_lookups import PrefixCacheLookups
from vllm_sched.engine.steps.running_order import RunningOrder
from vllm_sched.engine.steps.service_classes import ServiceClasses
from vllm_sched.engine.steps.slots import slots_taken
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.policies.types import Policy, Step

computed_tokens = attrgetter("num_computed_tokens")
LOADING: Final = RequestStatus.WAITING_FOR_REMOTE_KVS


class StepPlanner:
    def __init__(
        self,
        scheduler: Scheduler,
        policies: Sequence[Policy],
        *,
        clock: Callable[[], float],
        record_gate: Callable[[LaneKey, int | None], None],
    ) -> None:
        self._scheduler = scheduler
        self._policies = policies
        self._kv_cache = policy_setup.kv_cache_of(scheduler)
        self._chunked_prefill = bool(scheduler.scheduler_config.enable_chunked_prefill)
        self._blocks = None  # where chunks end at block boundaries
        if scheduler.need_mamba_block_aligned_split:
            self._blocks = BlockChunks(
                scheduler.cache_config.block_size, scheduler._mamba_block_aligned_split
            )
        self._num_departed = 0  # requests that released KV blocks since the last step
        self._last_was_empty = False  # although requests wait
        self.hooks = PolicyHooks.from_policies(policies)
        self.classes = ServiceClasses(policies)
        self.prefixes = PrefixCacheLookups(scheduler, self._kv_cache)
        self.admission = Admission(
            scheduler,
            self.hooks,
            self.prefixes,
            num_policies=len(policies),
            clock=clock,
            record_gate=record_gate,
        )
        self._order = RunningOrder(scheduler, policies, self.hooks, self.classes, self._kv_cache)
        self._pauses = DecodePauses(scheduler, self.hooks)
        self._budget = StepBudget(
            scheduler, self.hooks, self.admission, self.prefixes, self._blocks
        )

    def begin_step(self, now: float, wall_now: float) -> StepPlan:
        """Sort `running`, and show the step to the policies."""
        scheduler = self._scheduler
        kv_free = 1.0 - scheduler.kv_cache_manager.usage
        prefills, decoding, decode_is_last = self._order.sort(kv_free)
        self.admission.begin_step(now)
        kv_blocked = self.admission.queue.kv_blocked
        if kv_blocked is not None and self._has_room(kv_blocked, kv_free):
            kv_blocked = None
        step = Step(
            index=scheduler.current_step + 1,
            now=now,
            budget=scheduler.max_num_scheduled_tokens,
            decode_tokens=self._budget.decode_tokens(prefills, decoding),
            prefills=prefills,
            free_slots=scheduler.max_num_active_reqs - slots_taken(scheduler),
            kv_blocked=None if kv_blocked is None else kv_blocked.request_id,
            num_running=len(scheduler.running),
            decoding=decoding,
            context_tokens=sum(map(computed_tokens, decoding)),
            num_waiting=len(scheduler.waiting),
            num_holding_kv=len(scheduler.kv_holding_waiting),
            kv_free=kv_free,
            num_departed=self._num_departed,
            clock_offset=now - wall_now,
            paused_s=self._pauses.seconds(now),
            paused_steps=self._pauses.steps,
            next_to_enter=self.admission.next_to_enter,
            recount_held=self.admission.recount_held,
            class_of=self.classes.class_of,
            loading_requests=self._loading_requests,
            loaded_requests=self._loaded_requests,
            cached_tokens_of=self.prefixes.recent_cached_tokens,
        )
        self._num_departed = 0
        counts = self.admission.queue.lane_counts.by_policy
        for policy, counts_of_lanes in zip(self._policies, counts, strict=True):
            policy.begin_step(step, counts_of_lanes)
        return StepPlan(step, len(scheduler.running), decode_is_last)

    def pause_and_limit(self, plan: StepPlan) -> StepLimit | None:
        """Apply pauses and budgets; return the step's limit, None for vLLM's."""
        step = plan.step
        # After an empty step policies are ignored, so that the engine cannot stall.
        if self._last_was_empty or not (step.prefills or step.num_waiting or step.num_holding_kv):
            return None
        self._pauses.begin_step(plan)
        return self._budget.limit_step(step)

    def make_chunks(self, plan: StepPlan, limit: StepLimit) -> StepChunks | None:
        """Return the step's chunks, None without chunked prefill."""
        if not self._chunked_prefill:
            return None
        return StepChunks(
            plan.step,
            self.hooks,
            self.admission,
            self._blocks,
            token_limit=limit.tokens,
            room=self._budget.prefill_room(plan, limit),
        )

    def end_step(self, output: SchedulerOutput, plan: StepPlan) -> ScheduledStep | None:
        """Return what vLLM scheduled; None for an empty step."""
        scheduler, step = self._scheduler, plan.step
        self.admission.record_admissions()
        self._pauses.end_step(plan)
        empty = not output.total_num_scheduled_tokens
        had_work = step.prefills or step.num_waiting or step.num_holding_kv or plan.decodes_paused
        self._last_was_empty = (
            empty and bool(had_work) and scheduler.pause_state == PauseState.UNPAUSED
        )
        if empty:
            return None
        tokens = output.num_scheduled_tokens
        admitted = scheduler.running[plan.num_running :]
        chunks = chunks_of(itertools.chain(step.prefills, admitted), tokens)
        decodes = len(tokens) - len(chunks)
        context = step.context_tokens * decodes // max(len(step.decoding), 1)
        return ScheduledStep.of(
            scheduler, output, chunks, at=step.now, budget=step.budget, context_tokens=context
        )

    def record_departure(self, request: Request, now: float) -> None:
        self._num_departed += request.num_computed_tokens > 0
        self.classes.forget(request)
        if self.admission.lora_slots is not None:
            self.admission.lora_slots.record_departure(request)
        if self._blocks is not None:
            self._blocks.forget(request)
        for departed in self.hooks.departed:
            departed(request, now)

    def _loading_requests(self) -> list[Request]:
        if not self.prefixes.tiers.have_lookups:
            return []
        return [r for r in self._scheduler._inflight_prefills if r.status is LOADING]

    def _loaded_requests(self) -> list[Request]:
        received = self._scheduler.finished_recving_kv_req_ids
        return [r for r in self._loading_requests() if r.request_id in received] if received else []

    def _has_room(self, request: Request, kv_free: float) -> bool:
        blocks = int(kv_free * self._kv_cache.blocks)
        blocks -= self._scheduler.kv_cache_manager.watermark_blocks + 1
        return bool(self._kv_cache.blocks_for(request.num_tokens + 1) <= blocks)
