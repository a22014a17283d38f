"""The size of a long prompt's chunk, learned from step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from vllm_sched.cost.chunk_loss import LARGE_LOSS, SMALL_LOSS
from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.policies.long_prompts.chunk_size import MAX_INTERVAL, ChunkSize
from vllm_sched.policies.types import StepResult

BUDGET = 8192


def play(
    size: ChunkSize,
    seconds: Callable[[int, int], float],
    *,
    steps: int = 400,
    prompt: int = 32_000,
    most: int = BUDGET,
) -> list[int]:
    """Compute long prompts in chunks; `seconds` has tokens and context. Return the chunks."""
    computed, chunks = 0, []
    for _ in range(steps):
        tokens = min(size.next_chunk()[0], most, prompt - computed)
        chunks.append(tokens)
        took = seconds(tokens, computed)
        size.observe(StepResult(took, [Chunk(tokens, computed)], 8, 8))
        computed = (computed + tokens) % prompt
    return chunks


def made(itl_s: float = 10.0, most: int = BUDGET) -> ChunkSize:
    return ChunkSize(most, 16, itl_s)


def linear(fixed: float, token: float = 2e-5) -> Callable[[int, int], float]:
    return lambda tokens, _: fixed + token * tokens


@pytest.mark.parametrize(
    ("fixed", "size"),
    [
        (0.0, 128),  # nothing is lost: the smallest chunk
        (0.0001, 128),
        (0.0002, 256),
        (0.001, 1024),
        (0.002, 2048),
        (0.01, 8192),
        (1.0, 8192),  # every step takes equally long
    ],
)
def test_chunk_is_the_smallest_whose_half_loses_more(fixed: float, size: int) -> None:
    learned = made()
    play(learned, linear(fixed))
    assert learned.tokens == size


@pytest.mark.parametrize(("budget", "block"), [(5000, 16), (8192, 528), (1000, 528), (20, 16)])
@pytest.mark.parametrize("fixed", [0.0, 0.001, 1.0])
def test_chunk_has_whole_blocks_or_the_whole_budget(budget: int, block: int, fixed: float) -> None:
    learned = ChunkSize(budget, block, 10.0)
    sizes = {learned.tokens}
    for _ in range(40):
        play(learned, linear(fixed), steps=25, most=budget)
        sizes.add(learned.tokens)
    assert all(size == budget or (size > 0 and size % block == 0) for size in sizes)
    assert max(sizes) == budget or fixed < 1.0


def test_twice_the_loss_is_accepted_while_steps_exceed_the_target_gap() -> None:
    strict, relaxed = made(itl_s=0.050), made(itl_s=10.0)
    for each in (strict, relaxed):
        play(each, linear(0.002))
    # Half of 2,048 tokens lose 4.7 %, in steps of 43 ms.
    assert (relaxed.tokens, strict.tokens) == (2048, 2048)
    for each in (strict, relaxed):
        play(each, linear(0.004), steps=5000)
    # Half of 4,096 tokens lose 4.7 % too, in steps of 86 ms.
    assert (relaxed.tokens, strict.tokens) == (4096, 2048)
    assert SMALL_LOSS * 2 == LARGE_LOSS


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_a_busy_machine_do_not_change_the_size(seed: int) -> None:
    rng = random.Random(seed)
    slow = [1.0]

    def seconds(tokens: int, _: int) -> float:
        if rng.random() < 0.01:
            slow[0] = rng.choice([1.0, 1.5, 2.0])  # other programs come and go
        noise = rng.lognormvariate(0, 0.1) + (rng.random() < 0.01) * 5
        return (0.001 + 2e-5 * tokens) * slow[0] * noise

    learned = made()
    play(learned, seconds, steps=2000)
    sizes = []
    for _ in range(50):
        play(learned, seconds, steps=100)
        sizes.append(learned.tokens)
    assert 512 <= sorted(sizes)[25] <= 2048


def test_size_follows_a_change_of_the_machine() -> None:
    learned = made()
    play(learned, linear(0.0002))
    assert learned.tokens == 256
    play(learned, linear(0.01), steps=2000)
    assert learned.tokens == 8192


def test_comparisons_become_rare() -> None:
    learned = made()
    play(learned, linear(0.001), steps=1500)
    chunks = play(learned, linear(0.001), steps=2000, prompt=512_000)
    other = [chunk for chunk in chunks if chunk != learned.tokens]
    assert 0 < len(other) <= 2000 / MAX_INTERVAL + 20


def test_first_chunk_is_a_quarter_of_the_budget() -> None:
    assert made().tokens == BUDGET // 4
    assert made(most=3).tokens >= 1
    assert ChunkSize(1, 16, 0.1).next_chunk() == (1, 1)


def test_steps_of_other_prompts_are_not_compared() -> None:
    """A second prompt has another context, and so other step times."""
    learned = made()
    for number in range(300):
        tokens, _ = learned.next_chunk()
        context = 50_000 * (number % 2)
        learned.observe(StepResult(0.001 + 1e-7 * context, [Chunk(tokens, context)], 8, 8))
    assert learned.tokens == BUDGET // 4


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_step_without_a_duration_is_ignored(seconds: float) -> None:
    learned = made()
    play(learned, lambda *_: seconds, steps=50)
    assert learned.tokens == BUDGET // 4


@pytest.mark.parametrize(
    ("most", "block"), [(2048, 528), (4096, 1056), (8192, 2112), (63, 16), (48, 16), (31, 16)]
)
def test_whole_budget_is_reached_from_any_size(most: int, block: int) -> None:
    learned = ChunkSize(most, block, 10.0)
    play(learned, lambda *_: 0.05, most=most)
    assert learned.tokens == most


def test_half_of_the_least_chunk_is_a_block() -> None:
    """Hybrid models compute whole blocks: a comparison within one would show nothing."""
    learned = ChunkSize(4096, 528, 10.0)
    assert min(play(learned, linear(0.0), most=4096, prompt=1_000_000)) >= 528


@pytest.mark.parametrize(
    ("short", "context", "most", "fixed", "token", "sizes"),
    [
        pytest.param(50, 60_000, BUDGET, 0.0002, 2e-5, range(128, 513), id="long cached history"),
        # More tokens of shorts than half of the first chunk, in steps that last equally long.
        pytest.param(20, 0, 64, 0.05, 0.0, [64], id="shorts in every step"),
    ],
)
def test_short_prompts_do_not_stop_the_comparisons(
    short: int, context: int, most: int, fixed: float, token: float, sizes: Sequence[int]
) -> None:
    learned, computed = made(most=most), 0
    for _ in range(400):
        tokens, least = learned.next_chunk()
        chunk = max(tokens - short, least)
        chunks = [Chunk(short, context), Chunk(chunk, computed)]
        learned.observe(StepResult(fixed + token * (chunk + short), chunks, 8, 8))
        computed += chunk
    assert learned.tokens in sizes


@pytest.mark.parametrize(("others", "size"), [(0, 1024), (BUDGET, BUDGET // 4)])
def test_step_that_another_rank_makes_longer_is_not_compared(others: int, size: int) -> None:
    learned, computed = made(), 0
    for _ in range(400):
        tokens, _ = learned.next_chunk()
        result = StepResult(
            0.001 + 2e-5 * max(tokens, others), [Chunk(tokens, computed)], 8, 8,
            others=[StepShape(others, 0.0, 8)],
        )  # fmt: skip
        learned.observe(result)
        computed += tokens
    assert learned.tokens == size


def test_seconds_per_token_are_learnt() -> None:
    learned = made()
    play(learned, linear(0.0))
    assert learned.token_s == pytest.approx(2e-5, rel=0.05)
