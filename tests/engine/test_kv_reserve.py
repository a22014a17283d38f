"""KV blocks for long prompts in prefill, on real scheduler objects with few blocks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.making import Bench, PinnedChunk, add, wait

ENGINE = {"budget": 512, "max_model_len": 8_000, "num_blocks": 400}  # 6,400 tokens


def overdue_bench() -> tuple[Bench, Any]:
    """Return a bench in which chats fill the cache, and an overdue long among waiting chats."""
    bench = Bench({"long_prompt": {"max_wait_s": 5.0}}, **ENGINE)
    bench["long_prompt"].chunk_size = PinnedChunk(128)
    bench.add_all({f"chat{number}": 300 for number in range(40)}, output=60)
    bench.steps(20)
    long = bench.add("long", 4_000, output=2)
    bench.add_all({f"late{number}": 300 for number in range(100)}, output=60)
    bench.play(1, wait(6))
    bench.until(lambda: "long" in bench.running)
    return bench, long


def test_shorts_leave_the_blocks_that_a_long_needs() -> None:
    bench, long = overdue_bench()
    assert len(bench.scheduler.waiting) > 50
    bench.until(long.is_finished)
    assert not long.num_preemptions
    bench.drain()


def test_preempted_long_enters_before_shorts() -> None:
    bench, long = overdue_bench()
    bench.preempt(long)
    assert len(bench.scheduler.waiting) > 50
    assert bench.entries()[0] == "long"


@pytest.mark.parametrize("num_blocks", [400, 4_000])
def test_shorts_with_room_pass_the_long(num_blocks: int) -> None:
    bench = Bench({"long_prompt": {}}, **(ENGINE | {"num_blocks": num_blocks}))
    bench.add("long", 4_000)
    bench.play(2, add("short", 100), 1)
    assert "short" in bench.running


def test_held_shorts_leave_the_step_to_the_long() -> None:
    bench = Bench({"long_prompt": {}}, **ENGINE)
    bench["long_prompt"].chunk_size = PinnedChunk(400)
    bench.add("d", 3, output=900)
    bench.add("long", 5_000)
    bench.play(2, *(add(f"short{number}", 1_500) for number in range(2)), 2)
    assert bench.step()["long"] == 400
    assert bench["long_prompt"].held_reason("short") == "kv_of_longs"


def test_cached_tokens_of_a_turn_need_no_room() -> None:
    bench = Bench({"long_prompt": {}}, prefix_caching=True, **ENGINE)
    bench["long_prompt"].chunk_size = PinnedChunk(128)
    prefix = list(range(1, 2_001))
    bench.add("turn0", prefix, output=900)
    bench.play(5, add("long", 4_000), 2)
    bench.add("turn1", [*prefix, *range(3_000, 3_100)])
    bench.add("fresh", 1_000)
    bench.step()
    assert "turn1" in bench.running
    assert "fresh" not in bench.running
