"""Pauses of the decodes, for steps with prefills only."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.plan import StepPlan


class DecodePauses:
    def __init__(self, scheduler: Scheduler, hooks: PolicyHooks) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._since: float | None = None  # when the first paused step began
        self.steps = 0  # paused steps since then

    def seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def begin_step(self, plan: StepPlan) -> None:
        step = plan.step
        if not (step.decoding and any(pauses(step) for pauses in self._hooks.pauses_decodes)):
            return
        plan.decodes_paused = True
        if self._since is None:
            self._since = step.now
        self.steps += 1
        step.decode_tokens = 0
        for request in self._scheduler.running:
            if not request.is_prefill_chunk:
                # vLLM increments its step before it compares: this skips one step.
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, step.index + 1
                )

    def end_step(self, plan: StepPlan) -> None:
        if not plan.decodes_paused:
            self._since, self.steps = None, 0
