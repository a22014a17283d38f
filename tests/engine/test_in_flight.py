"""Steps in flight: the result and the duration of each."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_sched.cost.step_time import Chunk
from vllm_sched.engine.in_flight import MAX_IN_FLIGHT, FinishedStep, ScheduledStep, StepsInFlight


def scheduled(
    at: float, prompts: dict[str, Chunk] | None = None, decodes: int = 0
) -> ScheduledStep:
    chunks = prompts or {}
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: chunk.tokens for name, chunk in chunks.items()}
    output.num_scheduled_tokens |= {f"decode {i}": 1 for i in range(decodes)}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return ScheduledStep(output, 1, at, 512, chunks, 100 * decodes, len(chunks) + decodes, 0)


def begun(*started: ScheduledStep) -> StepsInFlight:
    steps = StepsInFlight()
    for step in started:
        steps.begin(step)
    return steps


def end(steps: StepsInFlight, step: ScheduledStep, at: float) -> FinishedStep:
    done = steps.end(step.output, lambda: at)
    assert done is not None
    return done


def test_result_describes_its_step() -> None:
    step = scheduled(10.0, {"a": Chunk(40, 60), "b": Chunk(7, 0)}, decodes=3)
    result = end(begun(step), step, 10.5).result
    assert list(result.chunks) == [Chunk(40, 60), Chunk(7, 0)]
    assert (result.decode_tokens, result.decodes, result.context_tokens) == (3, 3, 300)
    assert result.index == step.number
    assert result.seconds == 0.5


def test_step_behind_another_begins_at_its_end() -> None:
    first, second = scheduled(10.0, decodes=1), scheduled(10.01, {"a": Chunk(9, 0)})
    steps = begun(first, second)
    assert end(steps, first, 10.2).start == 10.0
    done = end(steps, second, 10.5)
    assert (done.start, done.end) == (10.2, 10.5)
    assert done.result.seconds == pytest.approx(0.3)


@pytest.mark.parametrize(("between", "asleep"), [(0.05, False), (30.0, True)])
@pytest.mark.parametrize("decodes", [0, 2])
def test_decode_time_includes_the_pause_since_the_last_result(
    between: float, asleep: bool, decodes: int
) -> None:
    first = scheduled(10.0, decodes=2)
    steps = begun(first)
    end(steps, first, 10.2)
    begun_at = 10.2 + between
    second = scheduled(begun_at, {"a": Chunk(9, 0)}, decodes)
    steps.begin(second)
    done = end(steps, second, begun_at + 0.1)
    assert done.start == begun_at
    counted = between if decodes and not asleep else 0.0
    assert done.result.seconds == pytest.approx(0.1 + counted)


def test_lost_result_is_forgotten_and_empty_result_is_none() -> None:
    steps = StepsInFlight()
    lost, step = scheduled(10.0, decodes=1), scheduled(10.1, decodes=1)
    empty = SchedulerOutput.make_empty()

    def never() -> float:
        raise AssertionError("the clock must not be read")

    assert steps.end(empty, never) is None
    for started in (lost, step):
        steps.begin(started)
    assert steps.end(empty, never) is None
    assert end(steps, step, 10.4).step is step
    assert steps.end(lost.output, never) is None


def test_clock_set_back_gives_a_positive_duration() -> None:
    first, second = scheduled(10.0, decodes=1), scheduled(10.1, decodes=1)
    steps = begun(first, second)
    end(steps, first, 10.2)
    assert end(steps, second, 5.0).result.seconds > 0


def test_number_of_kept_steps_is_bounded() -> None:
    given = [scheduled(float(number), decodes=1) for number in range(MAX_IN_FLIGHT + 3)]
    steps = begun(*given)
    assert steps.end(given[2].output, lambda: 99.0) is None
    assert end(steps, given[3], 99.0).step is given[3]
