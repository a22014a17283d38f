"""A step time with a curve over the tokens of a step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from vllm_sched.cost.curved_step_time import CURVE, CurvedStepTime, step_time_of
from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.errors import UsageError

# 5 ms up to 100 tokens, then 0.1 ms a token.
CURVED = CurvedStepTime(
    decode_fixed_s=0.001, decode_s=1e-5, context_s=1e-8, prefill_fixed_s=0.002, pair_s=1e-9,
    read_s=1e-8, prompt_fixed_s=1e-4, knots=(0, 1, 100, 1000), knots_s=(0.0, 0.005, 0.005, 0.095),
)  # fmt: skip
LINEAR = StepTime(decode_fixed_s=0.02, decode_s=1e-4, prefill_fixed_s=0.022, prefill_s=1e-4)


def test_prefills_and_decodes_share_the_curve() -> None:
    assert CURVED.seconds(StepShape()) == 0.0
    assert CURVED.seconds(StepShape(decodes=10)) == pytest.approx(0.001 + 1e-4 + 0.005)
    assert CURVED.seconds(StepShape(prefill_tokens=100)) == pytest.approx(0.002 + 0.005)
    both = StepShape(prefill_tokens=140, decodes=10)
    assert CURVED.seconds(both) == pytest.approx(0.001 + 1e-4 + 0.005 + 50 * 1e-4)
    assert replace(CURVED, mixed_s=0.003).seconds(both) - CURVED.seconds(both) == pytest.approx(
        0.003
    )
    # After the last knot it goes on as before it.
    assert CURVED.curve_seconds(2000) == pytest.approx(0.195)


def test_the_largest_chunk_fits_and_one_more_token_does_not() -> None:
    rng = random.Random(1)
    for _ in range(300):
        decodes, context = rng.choice((0, 1, 30, 200)), rng.choice((0, 500, 90_000))
        seconds = rng.uniform(0.001, 0.3)
        shape = StepShape(decodes=decodes, context_tokens=1000 * decodes)
        found = CURVED.prefill_within(seconds, decodes, 1000 * decodes, context)

        def took(tokens: int, shape: StepShape = shape, context: int = context) -> float:
            chunk = [Chunk(tokens, context)]
            return CURVED.seconds(StepShape.from_chunks(chunk, shape.decodes, shape.context_tokens))

        assert not found or took(found) <= seconds + 1e-9
        assert took(found + 1) > seconds - 1e-9


def test_what_a_chunk_adds_to_a_decode() -> None:
    alone = CURVED.seconds(StepShape(decodes=1, context_tokens=9))
    chunk = Chunk(300, 1000)
    together = CURVED.seconds(StepShape.from_chunks([chunk], 1, 9))
    assert alone + CURVED.chunk_seconds(chunk) == pytest.approx(together)


def test_near_it_is_linear() -> None:
    near = CURVED.linear_near(50, 400)
    assert type(near) is StepTime
    for shape in (StepShape(decodes=50), StepShape(decodes=50, prefill_tokens=400)):
        assert near.seconds(shape) == pytest.approx(CURVED.seconds(shape), rel=0.01)
    assert LINEAR.linear_near(50, 400) is LINEAR


def test_no_division_into_steps_takes_less_than_the_bound() -> None:
    bent = replace(CURVED, knots=(0, 1, 50, 100, 1000), knots_s=(0.0, 0.004, 0.006, 0.005, 0.095))
    rng = random.Random(2)
    for _ in range(200):
        steps = [rng.randint(1, 3000) for _ in range(rng.randint(1, 20))]
        least = bent.least_curve_seconds(sum(steps), len(steps))
        assert 0 < least <= sum(map(bent.curve_seconds, steps)) * (1 + 1e-9)
    assert LINEAR.least_curve_seconds(1000, 3) == 0.0


def test_a_file_keeps_it() -> None:
    assert step_time_of(CURVED.to_json()) == CURVED
    assert step_time_of(LINEAR.to_json()) == LINEAR


@pytest.mark.parametrize(
    ("curve", "reason"),
    [
        (3, "pairs of tokens and seconds"),
        ([[0, 0], [1]], "pairs of tokens and seconds"),
        ([[0, 0.0]], "pairs of tokens and seconds"),
        ([[1, 0.0], [2, 0.0]], "the first at 0 tokens"),
        ([[0, 0.0], [0, 0.0]], "rising tokens"),
        ([[0, 0.0], [1, -1.0]], "seconds from 0 up"),
        ([[0, 0.0], [1, "much"]], "seconds from 0 up"),
    ],
)
def test_curves_that_are_none(curve: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        step_time_of({CURVE: curve})
