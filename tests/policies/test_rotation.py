"""Rotation: A1 B1 C1 A2 ..., new prompts in turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench, Event, add, add_all, decode, wait
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.rotation import Rotation, RotationSettings
from vllm_sched.policies.types import EngineFacts, Gate, LaneCount, Step

WHOLE_PROMPT = {"scheduler_reserve_full_isl": True}  # enters only if all of it has room


def turns(names: str) -> list[dict[str, int]]:
    """Return whole steps of these requests."""
    return [{name: 64} for name in names]


def play(*events: Event, chunk: int = 0, max_wait_s: float = 10.0, **engine: Any) -> Bench:
    bench = Bench({"rotation": {"chunk": chunk, "max_wait_s": max_wait_s}}, **engine)
    bench.play(*events)
    return bench


def test_chunks_rotate() -> None:
    # The first finished prompt decodes in the step of the next one's last chunk.
    play(add_all("ABC", 192), *turns("ABCABCA"), {"A": 1, "B": 63})


def test_new_prompt_precedes_prompts_with_a_later_chunk() -> None:
    bench = play(add_all("AB", 640), *turns("ABA"), wait(0.001))
    # A has its chunk until now, B had its own before.
    bench.play(add("C", 640), *turns("BCABCA"))


def test_single_prompt_has_every_step() -> None:
    play(add("A", 640), *turns("AA"), chunk=10)


def test_chunk_setting_splits_a_step_into_full_turns() -> None:
    steps = [dict.fromkeys(names, 16) for names in ("ABCD", "EFAB", "CDEF")]
    play(add_all("ABCDEF", 96), *steps, chunk=16)


def test_turn_above_the_budget_is_a_whole_step() -> None:
    play(add_all("AB", 192), *turns("ABAB"), chunk=100)


def test_prompts_take_only_the_tokens_that_they_need() -> None:
    play(add("A", 40), add("B", 100), {"A": 40, "B": 24})
    play(add("A", 640), 1, add("s", 20), {"A": 44, "s": 20})


def test_decodes_get_their_tokens_first() -> None:
    bench = play(decode("d"), add_all("AB", 640), {"d": 1, "A": 63}, {"d": 1, "B": 63})
    bench.play(add("s", 20), 1, {"d": 1, "B": 43, "s": 20})


def test_no_turn_is_kept_for_more_prompts_than_slots() -> None:
    play(add("A", 640), 1, add_all("BC", 640), {"A": 32, "B": 32}, chunk=16, max_num_seqs=2)


def test_no_turn_is_kept_for_a_prompt_without_room() -> None:
    events = [add("A", 1300), 10, add("B", 1200), wait(2), 1, *turns("A" * 8)]
    play(*events, max_wait_s=1.0, num_blocks=110, **WHOLE_PROMPT)


def test_overdue_prompt_has_turns_while_many_wait() -> None:
    bench = play(add("A", 1400, output=2), 1, max_wait_s=1.0, max_num_seqs=64)
    for number in range(80):
        bench.add(f"n{number}", 640)
    assert sum(bench.step(0.1).get("A", 0) for _ in range(60)) >= 4 * 64


def test_block_alignment_adds_no_chunk_without_a_turn() -> None:
    """Hybrid models align chunks to the block boundaries of their state."""
    bench = Bench({"rotation": {}})
    bench.scheduler.need_mamba_block_aligned_split = True
    bench.scheduler._mamba_block_aligned_split = lambda _, tokens, *__: tokens // 16 * 16
    bench.play(add_all("AB", 192))
    assert ["".join(tokens) for tokens in bench.steps(6)] == [*"ABABAB"]


def test_prompts_of_one_step_do_not_need_the_same_blocks() -> None:
    bench = Bench({"rotation": {"chunk": 16}}, num_blocks=63)
    requests = bench.add_all(dict.fromkeys("ABCD", 300), output=1)
    # Three prompts of 19 blocks fit into 62 blocks.
    assert bench.step() == dict.fromkeys("ABC", 16)
    bench.drain()
    assert not any(request.num_preemptions for request in requests)


def begun(
    *prefills: FakeRequest, head: FakeRequest | None = None, decodes: int = 0, chunk: int = 0
) -> Rotation:
    """Return the policy in a step of 64 tokens, with a KV cache of ten blocks."""
    cache = KvCache(10, [KvGroup(16, 100)])
    policy = Rotation(EngineFacts(2000, 64, 16, cache), RotationSettings(chunk=chunk))
    step = Step(1, 0.0, 64, decodes, prefills, free_slots=16, next_to_enter=lambda: head)
    policy.begin_step(step, {"": LaneCount(requests=3)} if chunk else {})
    return policy


@pytest.mark.parametrize(
    ("computed", "tokens", "waited", "gate"),
    [
        (None, 5000, 0.0, Gate.OPEN),  # no prefill
        (0, 80, 0.0, Gate.OPEN),
        (0, 81, 0.0, Gate.CLOSED),
        (48, 128, 0.0, Gate.OPEN),
        (48, 129, 0.0, Gate.CLOSED),
        (0, 81, 9.9, Gate.CLOSED),
        (0, 81, 10.0, Gate.OPEN),
    ],
)
def test_prompt_enters_if_the_cache_has_blocks_for_all_or_after_its_bound(
    computed: int | None, tokens: int, waited: float, gate: Gate
) -> None:
    prefills = [] if computed is None else [FakeRequest("A", 80, num_computed_tokens=computed)]
    policy = begun(*prefills)
    assert policy.gate("", FakeRequest("B", tokens), waited) is gate
    assert policy.held_reason("") == "kv_of_prefills"


def test_tokens_taken_back_go_to_the_next_prompt() -> None:
    first, second = FakeRequest("A"), FakeRequest("B")
    policy = begun(first, second)
    assert policy.chunk(first, 0, 64) == 64
    policy.taken_back(first, 20)
    policy.taken_back(FakeRequest("waiting"), 9)
    assert policy.chunk(second, 0, 64) == 20


@pytest.mark.parametrize(
    ("head", "decodes", "chunk", "left"),
    [
        pytest.param(40, 0, 0, 24, id="newcomer that was held until now"),
        pytest.param(100, 0, 20, 0, id="turns of 22 tokens that exceed a step"),
        pytest.param(None, 64, 20, 1, id="decodes that fill a step"),
    ],
)
def test_prefill_gets_what_newcomers_and_decodes_leave(
    head: int | None, decodes: int, chunk: int, left: int
) -> None:
    first = FakeRequest("A")
    newcomer = None if head is None else FakeRequest("B", head)
    assert begun(first, head=newcomer, decodes=decodes, chunk=chunk).chunk(first, 0, 64) == left


def test_gauges_show_the_prompts_in_rotation() -> None:
    bench = play(add_all("ABC", 300), 2, chunk=16)
    assert bench["rotation"].gauges() == {"prompts_in_rotation": 3, "turn_tokens": 22}
