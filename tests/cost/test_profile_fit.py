"""The fit of a profile finds a curve, and its errors are those of the samples."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from vllm_sched.cost.curved_step_time import CurvedStepTime
from vllm_sched.cost.profile_fit import (
    KNOTS,
    TERMS,
    FitError,
    errors,
    fit,
    misses,
    sample_shapes,
)
from vllm_sched.cost.step_time import TimedStep

TRUE = CurvedStepTime(
    decode_fixed_s=0.001, decode_s=1e-5, context_s=2e-8, prefill_fixed_s=0.0015, pair_s=8e-10,
    prompt_fixed_s=1e-4, read_s=1e-8, knots=KNOTS,
    knots_s=(0.0, *(0.006 + max(n - 200, 0) * 2e-5 for n in KNOTS[1:])),
)  # fmt: skip
SAMPLED = [TimedStep(shape, TRUE.seconds(shape)) for shape in sample_shapes()]


def test_the_samples_span_what_a_profile_promises() -> None:
    shapes = sample_shapes()
    alone = [each for each in shapes if each.kind == "decode"]
    assert {each.decodes for each in alone} >= {1, 256}
    assert {each.context_tokens // each.decodes for each in alone} >= {1024, 32_768}
    prompts = {each.prefill_tokens for each in shapes if each.kind == "prefill"}
    assert {min(prompts), max(prompts)} == {128, 131_072}
    assert sum(shape.kind == shapes[-1].kind for shape in shapes) > 300


def test_it_finds_the_curve() -> None:
    found = errors(fit(SAMPLED), SAMPLED)
    assert set(found) == {"decode", "prefill", "mixed"}
    assert max(error.worst for error in found.values()) < 0.005
    assert misses(found) == []


def test_rounding_in_the_samples_changes_no_digit_of_a_data_file() -> None:
    rng = random.Random(0)
    rounded = [replace(s, seconds=s.seconds * (1 + rng.uniform(-4e-16, 4e-16))) for s in SAMPLED]
    found, other = fit(SAMPLED), fit(rounded)
    for name in TERMS:
        assert getattr(found, name) == pytest.approx(getattr(other, name), rel=1e-8)
    assert found.knots_s == pytest.approx(other.knots_s, rel=1e-8)


def test_a_line_misses_it_and_is_told() -> None:
    found = errors(CurvedStepTime(knots=(0, 1), knots_s=(0.0, 2e-5)), SAMPLED)
    assert any(text.startswith("decode median") for text in misses(found))
    assert any(text.startswith("decode worst") for text in misses(found))
    assert misses({"mixed": FitError(0.08, 0.25, 9)}) == []


def test_a_source_without_mixed_steps() -> None:
    sampled = [step for step in SAMPLED if step.shape.kind != "mixed"]
    found = errors(fit(sampled), sampled)
    assert set(found) == {"decode", "prefill"}
    assert found["prefill"].median == pytest.approx(0, abs=0.005)
