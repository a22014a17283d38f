"""Which built-in profile a measured worker is nearest to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_sched.cost.calibration import nearest
from vllm_sched.cost.profiles import find, measured
from vllm_sched.cost.step_time import Chunk, StepShape, TimedStep

SHAPES = [
    *(StepShape(decodes=b, context_tokens=1000 * b) for b in (1, 8, 32)),
    *(StepShape.of([Chunk(n, 0)], 0, 0) for n in (500, 2000)),
    StepShape.of([Chunk(1000, 0)], 8, 8000),
]


def test_a_worker_like_one_but_with_slow_mixed_steps() -> None:
    profile = find("h100-llama-3.1-8b-bf16-tp1")
    worker = replace(profile.time, mixed_s=0.01)
    steps = [TimedStep(shape, 1.1 * worker.seconds(shape)) for shape in SHAPES]
    found = nearest(steps, [find("a100-llama-3.1-70b-bf16-tp4"), profile, find("h200-8b")])
    assert found is not None
    assert found.profile is profile
    assert found.ratios["decode"] == pytest.approx(1.1)
    assert found.ratios["prefill"] == pytest.approx(1.1)
    assert found.ratios["mixed"] > 1.3


def test_nothing_to_compare() -> None:
    assert nearest([], measured().values()) is None
    assert nearest([TimedStep(SHAPES[0], 0.01)], []) is None
