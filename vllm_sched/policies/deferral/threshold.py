"""K, the number of departures that a hold waits for.

K is the minimum of the last four estimates, so that requests are held only after four estimates in
a row say that it pays. Batches of equal size do not separate the cost of a batch from the cost of
its prompts. A check therefore suspends holds at growing intervals, and compares single prompts with
the prediction.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import fmean, stdev
from typing import Final

from vllm_sched.cost.fit import OUTLIER, OnlineFit
from vllm_sched.cost.regime import Regime
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.cost.threshold import asymptotic, to_run, within_itl
from vllm_sched.policies.deferral.hold import CONSTANT_K_SHARE
from vllm_sched.policies.deferral.lengths import RequestLengths

ESTIMATE_INTERVAL_STEPS: Final = 64
ESTIMATES_IN_AGREEMENT: Final = 4
# A check ends after this many batches or steps.
CHECK_MAX_BATCHES, CHECK_MAX_STEPS = 24, 256
# Earlier if, within two standard errors, batches are not shorter by this share of their fixed cost.
CHECK_MIN_BATCHES, CHECK_TOLERANCE = 6, 0.3
# Estimates above 1 before the first check, and the maximum between checks.
FIRST_CHECK_AFTER, MAX_CHECK_AFTER = 4, 32
# If a check's estimate is below this share of K, the fit of batches keeps only this weight.
CHECK_CONFIRMS_SHARE, WEIGHT_AFTER_FAILED_CHECK = 0.6, 0.1


class DepartureThreshold:
    """K as configured or, if `departures` is None, as measured step times suggest."""

    def __init__(
        self,
        departures: int | None,
        fit: OnlineFit,
        lengths: RequestLengths,
        *,
        itl_s: float | None,
        max_hold_s: float,
        decodes_pause: bool,
        budget: int,
    ) -> None:
        self.k = departures or 1
        self.best = float(self.k)
        self.checking = False  # holds are suspended
        self._configured = departures
        self._fit = fit
        self._lengths = lengths
        self._itl_s = itl_s
        self._max_hold_s = max_hold_s
        self._decodes_pause = decodes_pause
        self._budget = budget
        self._next_estimate = ESTIMATE_INTERVAL_STEPS  # step index
        self._errors_s: list[float] = []  # measured minus predicted time of a check's batches
        self._check_after = FIRST_CHECK_AFTER
        self._unchecked = 0  # estimates since the last check
        self._estimates = deque([1] * ESTIMATES_IN_AGREEMENT, ESTIMATES_IN_AGREEMENT)

    @property
    def holds(self) -> bool:
        return self.k > 1 and not self.checking

    def begin_step(self, index: int, running_full: int) -> None:
        """Update K when an estimate is due; `running_full` requests fill the engine."""
        if index < self._next_estimate and not self._check_is_done():
            return
        self._update(running_full)
        self.checking = not self.checking and self._check_is_due()
        interval = CHECK_MAX_STEPS if self.checking else ESTIMATE_INTERVAL_STEPS
        self._next_estimate = index + interval

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record the prediction's error during a check, before the fit learns the step."""
        if self.checking and (model := self._fit.model) is not None:
            predicted = model.seconds(shape)
            # Stalls would hide that batches take less than predicted.
            self._errors_s.append(min(seconds - predicted, OUTLIER * self._fit.spread * predicted))

    def _update(self, slots: int) -> None:
        model = self._fit.model
        if model is None or not self._lengths.known:
            return
        if self._configured is not None:
            if self._itl_s is not None:
                most = within_itl(self._regime(model, slots), self._itl_s)
                self.k = max(min(self._configured, most), 1)
            return
        if self.checking and self._estimate(self._as_checked(model), slots) < (
            CHECK_CONFIRMS_SHARE * self.k
        ):
            self._fit.forget(
                "prefill" if self._decodes_pause else "mixed", WEIGHT_AFTER_FAILED_CHECK
            )
            self._estimates.extend([1] * ESTIMATES_IN_AGREEMENT)
        else:
            self._estimates.append(self._estimate(model, slots))
        self.best = asymptotic(self._regime(model, slots))
        self.k = min(self._estimates)

    def _estimate(self, model: StepTime, slots: int) -> int:
        most_s = CONSTANT_K_SHARE * self._max_hold_s
        return to_run(self._regime(model, slots), itl_s=self._itl_s, max_delay_s=most_s)

    def _regime(self, model: StepTime, slots: int) -> Regime:
        return Regime.of(
            model,
            slots=slots,
            mean_output=self._lengths.output,
            mean_prompt=self._lengths.prompt,
            decodes_pause=self._decodes_pause,
            budget=self._budget,
        )

    def _check_is_due(self) -> bool:
        if self.k == 1 or self._configured is not None:
            self._check_after, self._unchecked = FIRST_CHECK_AFTER, 0
            return False
        self._unchecked += 1
        if self._unchecked < self._check_after:
            return False
        self._check_after, self._unchecked = min(2 * self._check_after, MAX_CHECK_AFTER), 0
        self._errors_s.clear()
        return True

    def _check_is_done(self) -> bool:
        errors, model = self._errors_s, self._fit.model
        if not self.checking or len(errors) < CHECK_MIN_BATCHES or model is None:
            return False
        if len(errors) >= CHECK_MAX_BATCHES:
            return True
        at_least = fmean(errors) - 2 * stdev(errors) / math.sqrt(len(errors))
        fixed: float = getattr(model, self._fixed_cost)
        return at_least > -CHECK_TOLERANCE * fixed

    def _as_checked(self, model: StepTime) -> StepTime:
        """Return the model, with the mean error of the check in the fixed cost."""
        if len(self._errors_s) < CHECK_MIN_BATCHES:
            return model
        less = min(fmean(self._errors_s), 0.0)
        fixed: float = getattr(model, self._fixed_cost)
        return replace(model, **{self._fixed_cost: max(fixed + less, 0.0)})

    @property
    def _fixed_cost(self) -> str:
        return "prefill_fixed_s" if self._decodes_pause else "mixed_s"
