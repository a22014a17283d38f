"""Steps without a result yet, and their times. Policies and telemetry share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.engine.parallel.dp_group import DpGroup
from vllm_sched.engine.trace import StepNote
from vllm_sched.policies.types import StepResult

# vLLM has two steps in flight, or one per pipeline stage.
MAX_IN_FLIGHT: Final = 64
MIN_STEP_S: Final = 1e-6
# After longer gaps between steps the engine was idle.
MAX_GAP_S: Final = 1.0


class StepStarted(NamedTuple):
    output: SchedulerOutput
    number: int
    scheduled_at: float
    budget: int
    chunks: Mapping[str, Chunk]  # of prompts, by request
    context_tokens: int  # of all decodes
    running: int
    waiting: int

    @property
    def decodes(self) -> int:
        return len(self.output.num_scheduled_tokens) - len(self.chunks)

    @property
    def shape(self) -> StepShape:
        return StepShape.from_chunks(list(self.chunks.values()), self.decodes, self.context_tokens)

    def note(self, start: float, end: float) -> StepNote:
        """Return the step for the trace."""
        return StepNote(
            self.number,
            start,
            end,
            self.budget,
            self.output.num_scheduled_tokens,
            {request_id: chunk.context for request_id, chunk in self.chunks.items()},
            self.running,
            self.waiting,
            self.output.preempted_req_ids or (),
            self.output.finished_req_ids,
        )


class StepDone(NamedTuple):
    step: StepStarted
    start: float  # when the engine began it
    end: float
    result: StepResult


class InFlight:
    def __init__(self, dp_group: DpGroup | None = None) -> None:
        self._dp_group = dp_group
        self._steps: deque[StepStarted] = deque(maxlen=MAX_IN_FLIGHT)
        self._last_end = 0.0

    def begin(self, step: StepStarted) -> None:
        self._steps.append(step)
        if self._dp_group is not None:
            self._dp_group.begin(step.number, step.scheduled_at, step.shape)

    def end(self, output: SchedulerOutput, clock: Callable[[], float]) -> StepDone | None:
        """Return what a noted step did and how long it took."""
        # Results arrive in order: those of earlier steps are lost.
        steps = self._steps
        if not steps or (
            steps[0].output is not output and all(step.output is not output for step in steps)
        ):
            return None
        while (step := steps.popleft()).output is not output:
            pass
        end, decodes = clock(), step.decodes
        # The engine begins a step when the step before ends.
        start = since = max(step.scheduled_at, min(self._last_end, end))
        if decodes and 0 <= step.scheduled_at - self._last_end <= MAX_GAP_S:
            # Decodes wait since the last result.
            since = self._last_end
        self._last_end = end
        others: Sequence[StepShape] = ()
        if self._dp_group is not None:
            self._dp_group.end(step.number, end)
            # All ranks compute in the middle of the step.
            others = self._dp_group.other_shapes_at((start + end) / 2)
        chunks = list(step.chunks.values())
        decode_tokens = output.total_num_scheduled_tokens - sum([chunk.tokens for chunk in chunks])
        seconds = max(end - since, MIN_STEP_S)  # a clock may be set back
        result = StepResult(
            seconds, chunks, decode_tokens, decodes, step.context_tokens, step.number, others
        )
        return StepDone(step, start, end, result)


def chunks_of(prefills: Iterable[Request], tokens: Mapping[str, int]) -> dict[str, Chunk]:
    # vLLM already counts the step's tokens as computed.
    return {
        request.request_id: Chunk(new, request.num_computed_tokens - new)
        for request in prefills
        if (new := tokens.get(request.request_id, 0))
    }
