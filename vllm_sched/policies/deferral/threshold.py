"""K, the number of departures that a hold waits for.

K is the minimum of the last four estimates, so that requests are held only after four estimates in
a row say that it pays. Batches of equal size do not separate the cost of a batch from the cost of
its prompts. A check therefore suspends holds at intervals, and learns from single prompts.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import StepKind
from vllm_sched.cost.threshold import asymptotic, recommended, within_itl
from vllm_sched.policies.deferral.hold import CONSTANT_K_SHARE
from vllm_sched.policies.deferral.lengths import RequestLengths
from vllm_sched.policies.fluid_effects import AdmissionHold
from vllm_sched.policies.types import EngineFacts

ESTIMATE_INTERVAL_STEPS: Final = 64
ESTIMATES_IN_AGREEMENT: Final = 4
# A check begins after these numbers of estimates above 1 in a row, later at each multiple.
FIRST_CHECKS_AFTER, CHECK_EVERY = (4, 8, 16, 32), 64
# A check ends after this many batches or steps. Earlier batches keep only this weight.
CHECK_BATCHES, CHECK_STEPS, CHECK_MEMORY = 12, 256, 0.1


class DepartureThreshold:
    """K as configured or, if it is None, as measured step times suggest."""

    def __init__(
        self, configured: AdmissionHold, facts: EngineFacts, fit: OnlineFit, lengths: RequestLengths
    ) -> None:
        self.k = configured.departures or 1
        self.best = float(self.k)
        self._checking = False  # holds are suspended
        self._check_until = 0  # batches seen by the fit
        self._above_1 = 0  # estimates above 1 in a row
        self._configured = configured
        self._facts = facts
        self._fit = fit
        self._lengths = lengths
        self._batch_kind: StepKind = "prefill" if facts.decodes_pause else "mixed"
        self._next_estimate = ESTIMATE_INTERVAL_STEPS  # step index
        self._estimates = deque([1] * ESTIMATES_IN_AGREEMENT, ESTIMATES_IN_AGREEMENT)

    @property
    def may_hold(self) -> bool:
        return self.k > 1 and not self._checking

    def begin_step(self, index: int, running_when_full: int) -> None:
        """Update K when an estimate is due; `running_when_full` requests fill the engine."""
        batches = self._fit.count_of(self._batch_kind)
        if index < self._next_estimate and not (self._checking and batches >= self._check_until):
            return
        self._estimate(running_when_full)
        self._checking = not self._checking and self._check_is_due()
        if self._checking:
            self._fit.forget(self._batch_kind, CHECK_MEMORY)
            self._check_until = batches + CHECK_BATCHES
        self._next_estimate = index + (CHECK_STEPS if self._checking else ESTIMATE_INTERVAL_STEPS)

    def _check_is_due(self) -> bool:
        if self.k == 1 or self._configured.departures is not None:
            self._above_1 = 0
            return False
        self._above_1 += 1
        return self._above_1 in FIRST_CHECKS_AFTER or self._above_1 % CHECK_EVERY == 0

    def _estimate(self, slots: int) -> None:
        """Set K from the step times and lengths so far."""
        model = self._fit.model
        if model is None or not self._lengths.is_known:
            return
        backlog = BacklogModel.from_step_time(
            model,
            slots=slots,
            mean_output=self._lengths.mean_output,
            mean_prompt=self._lengths.mean_prompt,
            decodes_pause=self._facts.decodes_pause,
            budget=self._facts.max_num_batched_tokens,
        )
        departures, itl_s = self._configured.departures, self._configured.itl_s
        if departures is not None:
            if itl_s is not None:
                self.k = max(min(departures, within_itl(backlog, itl_s)), 1)
            return
        max_delay_s = CONSTANT_K_SHARE * self._configured.max_s
        self._estimates.append(recommended(backlog, itl_s=itl_s, max_delay_s=max_delay_s))
        self.best = asymptotic(backlog)
        self.k = min(self._estimates)
