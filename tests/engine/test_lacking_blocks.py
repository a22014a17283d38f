"""While the next request lacks KV blocks, running long prompts leave it no tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.policies.making import Bench, PinnedChunk

THRESHOLD, BUDGET, BLOCK = 2000, 512, 16
SETTINGS = {"long_prefill_token_threshold": THRESHOLD}


def world(blocks: int, **policies: Any) -> Bench:
    """Return a scheduler with few KV blocks, in which four requests decode."""
    made = Bench(
        policies or {"long_prompt": SETTINGS}, budget=BUDGET, max_model_len=16_000,
        num_blocks=blocks,
    )  # fmt: skip
    for number in range(4):
        made.add(f"chat {number}", 600, output=400)
    made.steps(8)
    return made


def free_tokens(made: Bench) -> int:
    return int(made.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * BLOCK)


def test_long_has_its_whole_chunk_while_a_short_lacks_blocks() -> None:
    made = world(490)
    made["long_prompt"].size = PinnedChunk(128)
    made.add("long", 5000)
    made.until(lambda: free_tokens(made) < 1900)
    made.add("short", 1990)
    made.step()  # finds that it lacks blocks
    assert [step["long"] for step in made.steps(5)] == [128] * 5
    assert "short" not in made.running


def test_comparison_has_half_a_chunk_while_a_short_lacks_blocks() -> None:
    made = world(490)
    made.add("long", 5000)
    made.until(lambda: free_tokens(made) < 1900)
    made.add("short", 1990)
    made.step()
    usual = made["long_prompt"].size.tokens
    assert {step["long"] for step in made.steps(3)} == {usual // 2, min(usual, BUDGET - 4)}


def test_urgent_short_passes_a_normal_one_that_lacks_blocks() -> None:
    made = world(490, lanes={}, long_prompt=SETTINGS)
    made["long_prompt"].size = PinnedChunk(BUDGET)  # would leave nothing
    made.add("long", 5000)
    made.until(lambda: free_tokens(made) < 1900)
    made.add("short", 1990)
    made.steps(2)
    assert "short" not in made.running
    made.add("urgent", 100, lane="urgent")
    made.steps(1)
    assert "urgent" in made.running


@pytest.mark.parametrize("seed", range(6))
def test_longs_are_not_slowed_in_random_worlds(seed: int) -> None:
    rng = random.Random(seed)
    made = world(rng.randint(400, 600))
    stuck_steps = 0
    for number in range(250):
        if rng.random() < 0.04:
            made.add(f"long {number}", rng.randint(2_100, 5_000), output=rng.randint(1, 40))
        if rng.random() < 0.05:
            made.add(f"short {number}", rng.randint(500, THRESHOLD), output=rng.randint(1, 200))
        stuck_steps += checked_step(made, rng.uniform(0.005, 0.02))
    assert stuck_steps
    made.drain()


def checked_step(made: Bench, seconds: float) -> bool:
    """Run a step; return whether longs ran while the next request lacked blocks."""
    scheduler = made.scheduler
    refused = scheduler.waiting.refused
    lacks = refused is not None and refused.num_tokens > free_tokens(made)
    running = set(scheduler.running)
    left = {r: r.num_tokens - r.num_computed_tokens for r in running if r.is_prefill_chunk}
    chunk = min(made["long_prompt"].size.tokens // 2, BUDGET - (len(running) - len(left)))
    step = made.step(seconds)
    if not (lacks and left and set(scheduler.running) == running) or min(left.values()) < chunk:
        return False
    assert sum(step.get(r.request_id, 0) for r in left) >= chunk
    return True
