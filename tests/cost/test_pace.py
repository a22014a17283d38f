"""The online fit of a step's time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.present import present
from vllm_sched.cost import pace as pace_module
from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.pace import StepPace, cut_to_tiles
from vllm_sched.cost.step_time import Chunk

BASE, PER_TOKEN, PER_PAIR, PER_READ = 0.004, 2e-5, 2e-8, 1.2e-6


def seconds(chunks: list[Chunk]) -> float:
    """Return the step time by the true model."""
    return BASE + sum(PER_TOKEN * c.tokens + PER_PAIR * c.attention for c in chunks)


def trained(noise: float = 0.0, seed: int = 1) -> StepPace:
    """Return a pace that saw a 12k prompt in chunks, with short prompts between."""
    rng = random.Random(seed)
    pace = StepPace()

    def feed(chunks: list[Chunk]) -> None:
        hiccup = rng.random() < noise
        pace.observe(seconds(chunks) * (1 + rng.random() * noise + 3 * hiccup), chunks)

    for _ in range(20):
        feed([])
    for context in range(0, 12_000, 256):
        feed([Chunk(256, context)])
        if context % 1024 == 0:
            feed([Chunk(100, 0)])
    return pace


def test_pace_is_unknown_before_both_kinds_of_step() -> None:
    pace = StepPace()
    assert pace.chunk_within(1.0, 0) is None
    pace.observe(0.004, [])
    assert pace.chunk_within(1.0, 0) is None
    pace.observe(0.1, [Chunk(512, 0)])
    assert pace.chunk_within(1.0, 0) is not None


def test_prefill_before_the_base_is_known_is_ignored() -> None:
    pace = StepPace()
    pace.observe(0.1, [Chunk(512, 0)])
    assert pace.per_token is None


@pytest.mark.parametrize("context", [0, 3_000, 12_000, 40_000])
def test_pace_recovers_the_model_of_its_steps(context: int) -> None:
    chunk = present(trained().chunk_within(0.05, context))
    a_token = PER_TOKEN + PER_PAIR * context
    assert seconds([Chunk(chunk, context)]) == pytest.approx(0.05, rel=0.01, abs=a_token + 5e-4)


@pytest.mark.parametrize("seed", range(5))
def test_chunk_size_accounts_for_reading_the_context(seed: int) -> None:
    """After long steps on an idle engine, brief steps keep their limit."""
    rng, pace, context, over = random.Random(seed), StepPace(), 0, []
    for _ in range(20):
        pace.observe(BASE, [])
    while context < 12_000:
        busy = context // 1500 % 2
        limit = (8 if busy else 24) * BASE
        tokens = min(pace.chunk_within(limit, context) or 512, 512)
        chunk = Chunk(tokens, context)
        took = seconds([chunk]) + PER_READ * context
        if busy and tokens < 512:
            over.append(took / limit)
        pace.observe(took * (1 + abs(rng.gauss(0, 0.08)) + 1.5 * (rng.random() < 0.02)), [chunk])
        if busy and rng.random() < 0.5:
            pace.observe(seconds([Chunk(100, 0)]), [Chunk(100, 0)])
        context += tokens
    assert len(over) > 20
    assert max(over) < 1.1


def test_prompt_progresses_though_reading_its_context_exceeds_the_limit() -> None:
    pace = StepPace(base=BASE, per_token=PER_TOKEN, per_pair=PER_PAIR, per_read=PER_READ)
    context = 40_000
    tokens = present(pace.chunk_within(0.05, context))
    work = seconds([Chunk(tokens, context)]) - BASE
    assert work == pytest.approx(min(PER_READ * context, 0.05), rel=0.05)


@pytest.mark.parametrize(("context", "least"), [(0, 1), (1_280, 10), (6_144, 48), (100_000, 48)])
def test_chunk_with_long_context_has_a_minimum_size(context: int, least: int) -> None:
    """The fit may take reading for attention, which a smaller chunk would have less of."""
    mistaken = StepPace(base=BASE, per_token=PER_TOKEN, per_pair=10 * PER_PAIR)
    assert mistaken.chunk_within(BASE + 1.5 * PER_TOKEN, context) == least


def test_fit_is_solved_on_demand_and_once_per_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[int] = []

    def counted(*given: Any) -> list[float]:
        solved.append(1)
        return non_negative(*given)

    monkeypatch.setattr(pace_module, "non_negative", counted)
    pace = trained()
    assert not solved
    before = pace.chunk_within(0.05, 3_000)
    once = len(solved)
    assert once
    assert pace.chunk_within(0.05, 3_000) == before
    assert pace.per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert len(solved) == once
    pace.observe(1.0, [Chunk(512, 0)])
    assert pace.per_token is not None
    assert pace.per_token > 1.05 * PER_TOKEN


def test_pace_stays_usable_despite_outliers() -> None:
    chunk = present(trained(noise=0.1).chunk_within(0.05, 6_000))
    assert seconds([Chunk(chunk, 6_000)]) == pytest.approx(0.05, rel=0.5)


def test_slow_step_hardly_raises_the_base_and_fast_step_lowers_it() -> None:
    pace = StepPace()
    pace.observe(0.004, [])
    pace.observe(0.040, [])
    assert pace.base == pytest.approx(0.0058)
    pace.observe(0.002, [])
    assert pace.base is not None
    assert pace.base < 0.005


def test_chunk_is_zero_below_the_base_time() -> None:
    assert trained().chunk_within(BASE / 2, 0) == 0


@pytest.mark.parametrize("seed", range(20))
def test_chunk_is_never_negative_for_random_observations(seed: int) -> None:
    rng = random.Random(seed)
    pace = StepPace()
    for _ in range(200):
        chunks = [Chunk(rng.randrange(1, 600), rng.randrange(0, 20_000))] * rng.randrange(0, 3)
        pace.observe(rng.choice([0.0, 1e-9, 0.001, 0.1, 5.0]), chunks)
        chunk = pace.chunk_within(rng.choice([0.0, 0.01, 1.0]), rng.randrange(0, 20_000))
        assert chunk is None or chunk >= 0


@pytest.mark.parametrize(
    ("tokens", "beside", "cut"),
    [(100, 0, 96), (96, 0, 96), (100, 4, 92), (127, 0, 112), (128, 31, 113), (0, 5, 0)],
)
def test_chunk_is_cut_to_whole_tiles(tokens: int, beside: int, cut: int) -> None:
    assert cut_to_tiles(tokens, beside) == cut


@pytest.mark.parametrize(
    ("tokens", "beside"), [(16, 15), (15, 31), (48, 31), (13, 3), (1, 0), (63, 0)]
)
def test_chunk_is_not_cut_if_the_cut_is_large(tokens: int, beside: int) -> None:
    assert cut_to_tiles(tokens, beside) == tokens
