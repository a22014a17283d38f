"""A step's time from its shape."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from vllm_sched.cost.step_time import UNBOUNDED, StepShape, StepTime
from vllm_sched.errors import UsageError

TIME = StepTime(
    decode_fixed_s=0.010,
    decode_s=6e-5,
    context_s=1e-8,
    prefill_fixed_s=0.012,
    prefill_s=9.5e-5,
    pair_s=1e-9,
    mixed_s=0.004,
    prompt_fixed_s=3e-4,
    read_s=4e-8,
)


def test_step_time_of_decode_prefill_and_mixed_steps() -> None:
    decode = 0.010 + 32 * 6e-5 + 9600 * 1e-8
    work = 300 * 9.5e-5 + 45_000 * 1e-9
    assert TIME.seconds(StepShape(decodes=32, context_tokens=9600)) == pytest.approx(decode)
    assert TIME.seconds(StepShape(300, 45_000.0)) == pytest.approx(0.012 + work)
    both = StepShape(300, 45_000.0, 32, 9600)
    assert both.kind == "mixed"
    assert TIME.seconds(both) == pytest.approx(decode + 0.004 + work)
    two = replace(both, prompts=2, read_tokens=5000)
    assert TIME.seconds(two) == pytest.approx(decode + 0.004 + work + 2 * 3e-4 + 5000 * 4e-8)
    assert TIME.seconds(StepShape()) == 0.0


def test_floor_bounds_steps_with_prefill() -> None:
    time = StepTime(decode_fixed_s=0.01, prefill_fixed_s=0.01, prefill_s=1e-4, floor_s=0.05)
    assert time.seconds(StepShape(prefill_tokens=100)) == 0.05
    assert time.seconds(StepShape(prefill_tokens=1000)) == pytest.approx(0.11)
    assert time.seconds(StepShape(decodes=4)) == pytest.approx(0.01)
    assert time.prefill_within(0.04, 0, 0, 0) == 0
    assert time.prefill_within(0.05, 0, 0, 0) == 400


@pytest.mark.parametrize("context", [0, 1_000, 100_000])
@pytest.mark.parametrize("decodes", [0, 1, 64])
def test_largest_chunk_fits_and_one_token_more_does_not(context: int, decodes: int) -> None:
    fitting = TIME.prefill_within(0.1, decodes, 300 * decodes, context)

    def seconds(tokens: int) -> float:
        pairs = tokens * (context + tokens / 2)
        return TIME.seconds(StepShape(tokens, pairs, decodes, 300 * decodes, 1, context))

    assert 0 < fitting < UNBOUNDED
    assert seconds(fitting) <= 0.1 + 1e-12
    assert seconds(fitting + 1) > 0.1


def test_prefill_within_edge_cases() -> None:
    assert TIME.prefill_within(0.001, 32, 9600, 0) == 0
    assert StepTime().prefill_within(0.1, 1, 10, 0) == UNBOUNDED
    assert StepTime(pair_s=1e-9).prefill_within(0.1, 0, 0, 0) == int(math.sqrt(0.2 / 1e-9))
    for seconds in (1e300, 1e305):
        assert TIME.prefill_within(seconds, 32, 9600, 0) == UNBOUNDED
        assert StepTime(prefill_s=9.5e-5).prefill_within(seconds, 0, 0, 0) == UNBOUNDED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode_s": -1e-9}, "decode_s=-1e-09 must be a number of seconds from 0 up"),
        ({"decode_s": math.nan}, "decode_s=nan"),
        ({"decode_s": "1"}, "decode_s='1'"),
        ({"decode_s": True}, "decode_s=True"),
        ({"decode_s": math.inf}, "decode_s=inf"),
        ({"decode_s": 10**400}, "decode_s=1000"),
        ({"speed": 1.0}, "unknown coefficient 'speed'; valid: decode_fixed_s, decode_s"),
        ([], "must be an object with decode_fixed_s"),
    ],
)
def test_errors_are_one_line_and_name_the_coefficient(given: object, message: str) -> None:
    with pytest.raises(UsageError, match=r"\A[^\n]+\Z") as error:
        StepTime.from_json(given)
    assert message in str(error.value)


def test_json_without_newer_coefficients_loads() -> None:
    saved = json.loads(json.dumps(TIME.to_json()))
    assert StepTime.from_json(saved) == TIME
    del saved["prompt_fixed_s"], saved["read_s"]
    assert StepTime.from_json(saved) == replace(TIME, prompt_fixed_s=0.0, read_s=0.0)
