"""Held admissions in the fluid engine: when, and for how long.

Same rules as `policies/deferred_prefill`, but the step time is known instead of learned.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.step_time import StepShape
from vllm_sched.cost.threshold import recommended
from vllm_sched.policies.fluid_effects import AdmissionHold
from vllm_sched.sim.engines.kv_blocks import Task
from vllm_sched.sim.types import WorkerModel

UPDATE_EVERY_ADMISSIONS: Final = 64  # admissions
FOREVER: Final = 1 << 40


class EngineLoad(Protocol):
    """The request counts of an engine, as `FluidScheduler` has them."""

    waiting: int
    decoding: int
    context: int

    @property
    def running(self) -> int: ...


class Deferral:
    def __init__(self, model: WorkerModel, hold: AdmissionHold, *, decodes_pause: bool) -> None:
        self.holding = False
        self.threshold = hold.departures or 1
        self._model = model
        self._hold = hold
        self._decodes_pause = decodes_pause  # decodes pause during prefill
        self._since = 0.0
        self._departed = 0
        self._slots_full = True
        self._full = False  # the last step left no slot or no KV room
        self._admitted = self._prompts = 0
        self._ended = self._outputs = 0

    def record_admission(self, task: Task) -> None:
        self._admitted += 1
        self._prompts += task.left
        if (
            self._hold.departures is None
            and self._admitted % UPDATE_EVERY_ADMISSIONS == 0
            and self._ended
        ):
            self.threshold = self._compute_threshold()

    def record_departure(self, task: Task) -> None:
        self._departed += 1
        self._ended += 1
        self._outputs += task.job.output_tokens

    def update(self, now: float, load: EngineLoad) -> None:
        if not self.holding:
            if self._full and self.threshold > 1 and load.waiting:
                self.holding, self._since, self._departed = True, now, 0
            else:
                return
        wanted = self._departures_needed(now)
        free = self._model.max_num_seqs - load.running
        left = free if self._slots_full else self._departed
        if not load.running or not wanted or load.waiting < wanted or left >= wanted:
            self.holding = False

    def record_step(self, load: EngineLoad, *, refused: bool) -> None:
        if not self.holding:
            self._slots_full = load.running >= self._model.max_num_seqs
            self._full = self._slots_full or refused

    def steps(self, now: float, load: EngineLoad) -> int:
        """Return the steps until the hold must be checked again."""
        if not self.holding:
            return FOREVER
        shape = StepShape(decodes=max(load.decoding, 1), context_tokens=load.context)
        seconds = self._model.time.seconds(shape)
        # K falls during the second half of the longest hold; check every eighth.
        due = self._since + self._hold.max_s / 2
        if now >= due:
            due = now + self._hold.max_s / 8
        return max(math.ceil((due - now) / seconds), 1) if seconds else 1

    def _departures_needed(self, now: float) -> int:
        progress = (now - self._since) / self._hold.max_s
        if progress >= 1:
            return 0
        return math.ceil(self.threshold * min(2 * (1 - progress), 1.0))

    def _compute_threshold(self) -> int:
        model = self._model
        backlog = BacklogModel.from_step_time(
            model.time,
            slots=model.max_num_seqs,
            mean_output=max(self._outputs / self._ended - 1, 1.0),
            mean_prompt=max(self._prompts / self._admitted, 1.0),
            decodes_pause=self._decodes_pause,
            budget=model.max_num_batched_tokens,
        )
        return recommended(backlog, itl_s=self._hold.itl_s, max_delay_s=self._hold.max_s / 2)
