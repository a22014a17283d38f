"""Steps whose results are not back yet, and how long each took once its is.

Everybody who learns from steps or shows them goes by these notes, so that what is predicted is held
against the very time that was learnt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.engine.parallel.dp_group import DpGroup
from vllm_sched.policies.types import StepResult

# vLLM has two, and one per stage with pipeline parallelism.
MOST: Final = 64
LEAST_STEP_S: Final = 1e-6
# Between two steps: for longer the engine was paused, or asleep.
MOST_BETWEEN_S: Final = 1.0


class StepStarted(NamedTuple):
    """A step that the engine was given."""

    output: SchedulerOutput
    number: int
    scheduled_at: float
    budget: int
    chunks: Mapping[str, Chunk]  # of prompts, by request
    context_tokens: int  # of those that decode, together
    running: int
    waiting: int

    @property
    def decodes(self) -> int:
        """How many decode."""
        return len(self.output.num_scheduled_tokens) - len(self.chunks)

    @property
    def shape(self) -> StepShape:
        """Return what the step computes."""
        return StepShape.of(list(self.chunks.values()), self.decodes, self.context_tokens)


class StepDone(NamedTuple):
    """A step whose result is back."""

    step: StepStarted
    start: float  # when the engine began it
    end: float
    result: StepResult


class InFlight:
    """See the module's text."""

    def __init__(self, dp_group: DpGroup | None = None) -> None:
        self._dp_group = dp_group
        self._steps: deque[StepStarted] = deque(maxlen=MOST)
        self._last_end = 0.0

    def begin(self, step: StepStarted) -> None:
        """Note a step that was scheduled; an empty one takes no time and is not noted."""
        self._steps.append(step)
        if self._dp_group is not None:
            self._dp_group.begin(step.number, step.scheduled_at, step.shape)

    def end(self, output: SchedulerOutput, clock: Callable[[], float]) -> StepDone | None:
        """Say what a step did and how long it took; None of one that was not noted."""
        # Results come back in the order of their steps; one whose result never came is forgotten.
        steps = self._steps
        if not steps or (
            steps[0].output is not output and all(step.output is not output for step in steps)
        ):
            return None
        while (step := steps.popleft()).output is not output:
            pass
        end, decodes = clock(), step.decodes
        # The engine began it when it was scheduled, or when it was done with the one before.
        # A clock that was set back would make it none, or less; a step takes longer than that.
        start = since = max(step.scheduled_at, min(self._last_end, end))
        if decodes and 0 <= step.scheduled_at - self._last_end <= MOST_BETWEEN_S:
            # Who decodes has waited since the last result, whatever the engine did until it began.
            since = self._last_end
        self._last_end = end
        others: Sequence[StepShape] = ()
        if self._dp_group is not None:
            self._dp_group.end(step.number, end)
            # Ranks begin and end a step at nearly the same time. In its middle all compute it.
            others = self._dp_group.others_at((start + end) / 2)
        chunks = list(step.chunks.values())
        decode_tokens = output.total_num_scheduled_tokens - sum([chunk.tokens for chunk in chunks])
        seconds = max(end - since, LEAST_STEP_S)
        result = StepResult(
            seconds, chunks, decode_tokens, decodes, step.context_tokens, step.number, others
        )
        return StepDone(step, start, end, result)


def chunks_of(prefills: Iterable[Request], tokens: Mapping[str, int]) -> dict[str, Chunk]:
    """Say what each prompt had of a step that was scheduled."""
    # Upstream has counted the step's tokens as computed already.
    return {
        request.request_id: Chunk(new, request.num_computed_tokens - new)
        for request in prefills
        if (new := tokens.get(request.request_id, 0))
    }
