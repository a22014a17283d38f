"""Steps without a result yet, and their times. Policies and telemetry share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.engine.parallel.dp_group import DpGroup
from vllm_sched.engine.trace import TracedStep
from vllm_sched.policies.types import StepResult

# vLLM has two steps in flight, or one per pipeline stage.
MAX_IN_FLIGHT: Final = 64
MIN_STEP_S: Final = 1e-6
# After longer gaps between steps the engine was idle.
MAX_GAP_S: Final = 1.0


class ScheduledStep(NamedTuple):
    output: SchedulerOutput
    number: int
    scheduled_at: float
    budget: int
    chunks: Mapping[str, Chunk]  # of prompts, by request
    context_tokens: int  # of all decodes
    num_running: int
    num_waiting: int

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        output: SchedulerOutput,
        chunks: Mapping[str, Chunk],
        *,
        at: float,
        budget: int,
        context_tokens: int = 0,
    ) -> Self:
        """Return the step that the scheduler has just scheduled."""
        return cls(
            output, scheduler.current_step, at, budget, chunks, context_tokens,
            len(scheduler.running), len(scheduler.waiting),
        )  # fmt: skip

    @property
    def decodes(self) -> int:
        return len(self.output.num_scheduled_tokens) - len(self.chunks)

    @property
    def shape(self) -> StepShape:
        return StepShape.from_chunks(list(self.chunks.values()), self.decodes, self.context_tokens)

    def traced(self, start: float, end: float) -> TracedStep:
        return TracedStep(
            number=self.number,
            start=start,
            end=end,
            budget=self.budget,
            tokens=self.output.num_scheduled_tokens,
            contexts={request_id: chunk.context for request_id, chunk in self.chunks.items()},
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            preempted=self.output.preempted_req_ids or (),
            ended=self.output.finished_req_ids,
        )


class FinishedStep(NamedTuple):
    step: ScheduledStep
    start: float  # when the engine began it
    end: float
    result: StepResult


class StepsInFlight:
    def __init__(self, dp_group: DpGroup | None = None) -> None:
        self._dp_group = dp_group
        self._steps: deque[ScheduledStep] = deque(maxlen=MAX_IN_FLIGHT)
        self._last_end = 0.0

    def begin(self, step: ScheduledStep) -> None:
        self._steps.append(step)
        if self._dp_group is not None:
            self._dp_group.begin(step.number, step.scheduled_at, step.shape)

    def end(self, output: SchedulerOutput, clock: Callable[[], float]) -> FinishedStep | None:
        """Return what the step of an output did and how long it took; None if it is unknown."""
        if (step := self._pop(output)) is None:
            return None
        end, last_end = clock(), self._last_end
        self._last_end = end
        # The engine begins a step when the step before ends.
        start = max(step.scheduled_at, min(last_end, end))
        decodes_wait = step.decodes and 0 <= step.scheduled_at - last_end <= MAX_GAP_S
        since = last_end if decodes_wait else start
        others: Sequence[StepShape] = ()
        if self._dp_group is not None:
            self._dp_group.end(step.number, end)
            # All ranks compute in the middle of the step.
            others = self._dp_group.other_shapes_at((start + end) / 2)
        chunks = list(step.chunks.values())
        prefill_tokens = sum([chunk.tokens for chunk in chunks])
        result = StepResult(
            seconds=max(end - since, MIN_STEP_S),  # a clock may be set back
            chunks=chunks,
            decode_tokens=output.total_num_scheduled_tokens - prefill_tokens,
            decodes=step.decodes,
            context_tokens=step.context_tokens,
            index=step.number,
            others=others,
        )
        return FinishedStep(step, start, end, result)

    def _pop(self, output: SchedulerOutput) -> ScheduledStep | None:
        """Remove the step of an output, and earlier steps: results arrive in order."""
        for earlier, step in enumerate(self._steps):
            if step.output is output:
                for _ in range(earlier + 1):
                    self._steps.popleft()
                return step
        return None


def chunks_of(prefills: Iterable[Request], tokens: Mapping[str, int]) -> dict[str, Chunk]:
    # vLLM already counts the step's tokens as computed.
    return {
        request.request_id: Chunk(new, request.num_computed_tokens - new)
        for request in prefills
        if (new := tokens.get(request.request_id, 0))
    }
