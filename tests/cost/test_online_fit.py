"""The online fit of the step time model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import StepShape, StepTime

TRUE = StepTime(
    decode_fixed_s=0.010,
    decode_s=2e-4,
    context_s=2e-8,
    prefill_fixed_s=0.012,
    prefill_s=9.5e-5,
    pair_s=5e-9,
    mixed_s=0.004,
)


def shape(rng: random.Random, *, batch: tuple[int, int] = (8, 64)) -> StepShape:
    """Draw a step as a busy engine makes them."""
    decodes = rng.randint(*batch)
    context = decodes * rng.randint(200, 600)
    kind = rng.random()
    if kind < 0.4:
        return StepShape(decodes=decodes, context_tokens=context)
    tokens = rng.randint(10, 1500)
    pairs = tokens * rng.randint(0, 4000) + tokens * tokens / 2
    if kind < 0.5:
        return StepShape(tokens, pairs)
    return StepShape(tokens, pairs, decodes, context)


def feed(
    fit: OnlineFit,
    true: StepTime,
    steps: int,
    *,
    seed: int = 1,
    noise: float = 0.0,
    hiccups: float = 0.0,
) -> None:
    """Observe steps whose times follow a model, with noise."""
    rng = random.Random(seed)
    for _ in range(steps):
        step = shape(rng)
        slower = 1 + abs(rng.gauss(0, noise)) + (5.0 if rng.random() < hiccups else 0.0)
        fit.observe(step, true.seconds(step) * slower)


def fitted(fit: OnlineFit) -> StepTime:
    assert fit.model is not None
    return fit.model


def assert_predictions_close(fit: OnlineFit, rng: random.Random, median: float = 0.05) -> None:
    """Compare the prediction errors with their limits."""
    steps = [shape(rng) for _ in range(200)]
    errors = sorted(abs(fitted(fit).seconds(step) / TRUE.seconds(step) - 1) for step in steps)
    assert errors[100] < median
    assert errors[190] < 0.15


def test_fit_has_no_model_until_it_saw_enough_steps() -> None:
    fit = OnlineFit()
    for _ in range(100):
        fit.observe(StepShape(decodes=8, context_tokens=800), 0.01)
    assert fit.model is None  # nothing with prefill yet
    for _ in range(4):
        fit.observe(StepShape(100, 5000.0, 8, 800), 0.02)
    assert fit.model is not None


def test_fit_recovers_the_model_of_its_steps() -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 1000)
    found = fitted(fit)
    for name, value in TRUE.to_json().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1), name


def prompts(rng: random.Random, max_prompts: int, decodes: int = 24) -> StepShape:
    """Draw a step that prefills up to so many prompts of random length, or none."""
    count = rng.choice([0, *range(1, max_prompts + 1)])
    tokens = [rng.randint(10, 200) for _ in range(count)]
    pairs = sum(each**2 / 2 for each in tokens)
    batch = rng.randint(decodes // 2, decodes)
    return StepShape(sum(tokens), pairs, batch, 200 * batch, count)


@pytest.mark.parametrize("mixed_s", [0.0, 0.004])
def test_cost_per_prompt_is_separated_from_cost_of_mixing(mixed_s: float) -> None:
    true = replace(TRUE, mixed_s=mixed_s, prompt_fixed_s=0.003)
    fit, rng = OnlineFit(), random.Random(8)
    for _ in range(1000):
        step = prompts(rng, 4)
        fit.observe(step, true.seconds(step) * (1 + abs(rng.gauss(0, 0.03))))
    found = fitted(fit)
    assert found.prompt_fixed_s == pytest.approx(0.003, rel=0.2)
    assert found.mixed_s == pytest.approx(mixed_s, abs=0.0008)


def long_chunk(rng: random.Random, max_tokens: int) -> StepShape:
    tokens, read = rng.randint(16, max_tokens), rng.randrange(0, 12_000)
    return StepShape(tokens, tokens * (read + tokens / 2), 8, 1600, 1, read)


def test_cost_of_reading_context_is_separated_from_attention() -> None:
    true = replace(TRUE, read_s=1e-6)
    fit, rng = OnlineFit(), random.Random(8)
    for _ in range(1000):
        step = (
            long_chunk(rng, 500)
            if rng.random() < 0.7
            else StepShape(decodes=8, context_tokens=1600)
        )
        fit.observe(step, true.seconds(step) * (1 + abs(rng.gauss(0, 0.03))))
    assert fitted(fit).read_s == pytest.approx(1e-6, rel=0.15)
    assert fitted(fit).pair_s == pytest.approx(TRUE.pair_s, rel=0.1)


def test_predictions_stay_close_despite_noise_and_outliers() -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 2000, noise=0.05, hiccups=0.03)
    assert_predictions_close(fit, random.Random(7), median=0.06)
    assert fitted(fit).mixed_s == pytest.approx(TRUE.mixed_s, rel=0.35)


def test_one_outlier_hardly_changes_the_model() -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 1000, noise=0.02)
    before = fitted(fit)
    step = StepShape(decodes=32, context_tokens=9600)
    fit.observe(step, 100.0)
    for _ in range(16):
        fit.observe(step, TRUE.seconds(step))
    assert fitted(fit).seconds(step) == pytest.approx(before.seconds(step), rel=0.02)


@pytest.mark.parametrize("hiccup", [1e-5, 0.001, 5.0, 100.0])
@pytest.mark.parametrize("number", [0, 1, 7, 15, 16])
def test_outlier_among_the_first_steps_hardly_changes_the_model(hiccup: float, number: int) -> None:
    fit, rng = OnlineFit(), random.Random(6)
    for index in range(200):
        step = shape(rng)
        fit.observe(step, hiccup if index == number else TRUE.seconds(step))
    assert_predictions_close(fit, rng)


@pytest.mark.parametrize(
    "first",
    [
        [(0, 20)] * 12 + [(600, 20)] * 3 + [(600, 0)],  # the only prefill among the first sixteen
        [(0, 20)] * 13 + [(600, 20)] * 4,  # the fourth completes what a model needs
    ],
)
def test_outlier_that_is_the_only_step_of_its_kind_is_ignored(first: list[tuple[int, int]]) -> None:
    fit, rng = OnlineFit(), random.Random(7)
    steps = [StepShape(p, p * p / 2, d, 400 * d) for p, d in first]
    for step in steps[:-1]:
        fit.observe(step, TRUE.seconds(step))
    fit.observe(steps[-1], 1e-5)
    for _ in range(200):
        step = shape(rng)
        fit.observe(step, TRUE.seconds(step))
    assert_predictions_close(fit, rng)


def test_late_results_harm_no_more_than_noise() -> None:
    fit, rng = OnlineFit(), random.Random(5)
    for index in range(2000):
        step = shape(rng)
        # A result that waits for the previous one has almost no time of its own.
        late = {0: 2.0, 1: 1e-3}.get(index % 25, 1.0)
        fit.observe(step, TRUE.seconds(step) * late)
    assert_predictions_close(fit, rng, median=0.06)


def test_fit_follows_a_lasting_change() -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 1000)
    slower = replace(TRUE, decode_fixed_s=0.030, mixed_s=0.020)
    feed(fit, slower, 1500, seed=2)
    assert fitted(fit).decode_fixed_s == pytest.approx(0.030, rel=0.15)
    assert fitted(fit).mixed_s == pytest.approx(0.020, rel=0.2)


def test_an_hour_of_decoding_keeps_the_prefill_coefficients() -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 1000)
    rng = random.Random(3)
    for _ in range(5000):
        step = replace(shape(rng), prefill_tokens=0, pairs=0.0, decodes=rng.randint(8, 64))
        fit.observe(step, TRUE.seconds(step))
    assert fitted(fit).prefill_s == pytest.approx(TRUE.prefill_s, rel=0.1)
    assert fitted(fit).mixed_s == pytest.approx(TRUE.mixed_s, rel=0.1)


# What cannot be told apart


def fitted_to(time: StepTime, steps: Iterable[StepShape], noise: float = 0.0) -> StepTime:
    """Return the model of steps that take this time."""
    fit, rng = OnlineFit(), random.Random(8)
    for step in steps:
        fit.observe(step, time.seconds(step) * (1 + abs(rng.gauss(0, noise))))
    return fitted(fit)


def test_chunks_of_equal_size_attribute_the_cost_to_attention() -> None:
    rng = random.Random(8)
    chunks = [(read := rng.randrange(0, 12_000), 500 * (read + 250.0)) for _ in range(1000)]
    steps = [StepShape(500, pairs, 8, 1600, 1, read) for read, pairs in chunks]
    found = fitted_to(TRUE, [*steps, *[StepShape(decodes=8, context_tokens=1600)] * 1000], 0.03)
    assert found.pair_s == pytest.approx(TRUE.pair_s, rel=0.1)
    assert found.read_s < 0.1 * 500 * TRUE.pair_s


def test_cost_of_single_prompts_is_not_taken_for_cost_of_mixing() -> None:
    rng = random.Random(9)
    true = replace(TRUE, mixed_s=0.0, prompt_fixed_s=0.005)
    assert fitted_to(true, (prompts(rng, 1) for _ in range(1000))).mixed_s < 0.0005


def in_a_constant_batch(tokens: int) -> StepShape:
    return StepShape(tokens, tokens * 110.0, 64, 64 * 300)


def test_cost_of_equal_prompts_is_not_taken_for_cost_of_mixing() -> None:
    steps = (in_a_constant_batch(220 if index % 3 == 0 else 0) for index in range(500))
    assert fitted_to(replace(TRUE, mixed_s=0.0), steps).mixed_s < 0.001


def test_constant_batch_counts_as_fixed_cost() -> None:
    rng = random.Random(4)
    steps = (in_a_constant_batch(rng.choice([0, 0, 220, 440])) for _ in range(500))
    found = fitted_to(TRUE, steps)
    whole = TRUE.decode_fixed_s + 64 * TRUE.decode_s + 64 * 300 * TRUE.context_s
    assert found.decode_fixed_s == pytest.approx(whole, rel=0.05)
    assert found.mixed_s <= TRUE.mixed_s * 1.2


def test_fixed_prefill_cost_without_pure_prefill_steps_is_decode_plus_mixing() -> None:
    rng = random.Random(5)
    found = fitted_to(TRUE, (step for _ in range(500) if (step := shape(rng)).decodes))
    assert found.prefill_fixed_s == pytest.approx(found.decode_fixed_s + found.mixed_s)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds: float) -> None:
    fit = OnlineFit()
    feed(fit, TRUE, 200)
    before = fit.count_of("decode")
    fit.observe(StepShape(decodes=8, context_tokens=800), seconds)
    assert fit.count_of("decode") == before


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_give_valid_coefficients(seed: int) -> None:
    rng = random.Random(seed)
    fit = OnlineFit()
    for _ in range(300):
        step = StepShape(
            rng.choice([0, 0, 1, 300, 8000]),
            rng.choice([0.0, 1.0, 1e9]),
            rng.choice([0, 1, 256]),
            rng.choice([0, 1, 10**7]),
        )
        fit.observe(step, rng.choice([1e-12, 1e-3, 0.02, 5.0, 1e6]))
        if fit.model is not None:  # StepTime refuses what is negative or not finite
            assert fit.model.prefill_within(0.05, 4, 400, 100) >= 0


def test_slowest_returns_the_rank_with_the_longest_prediction() -> None:
    fit = OnlineFit()
    few_far, many = StepShape(500, 500 * 30_000.0, 8, 4_000), StepShape(1_000, 5e5, 8, 4_000)
    assert fit.slowest(few_far, ()) is few_far
    # Without a model, tokens decide.
    assert fit.slowest(few_far, [many, StepShape(decodes=8)]) is many
    feed(fit, TRUE, 2_000)
    assert fit.slowest(few_far, [many]) is few_far
    assert fit.slowest(StepShape(decodes=8), [many, few_far]) is few_far
