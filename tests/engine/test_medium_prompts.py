"""`long_prompt` and prompts below its threshold that fill steps, on real scheduler objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.schedulers import make_request
from tests.policies.making import Bench, PinnedChunk, Policies, add, add_all, decode, wait
from vllm_sched.policies.long_prompt import LongPrompt, LongPromptSettings
from vllm_sched.policies.types import EngineFacts, Step

LARGE_STEP: dict[str, Any] = {"budget": 8_192, "max_model_len": 32_000, "num_blocks": 8_000}
# Prompts of 2,049 to 5,242 tokens need several steps, and are not long.
SMALL_STEP: dict[str, Any] = {"budget": 2_048, "max_model_len": 131_072, "num_blocks": 9_000}


def loaded(*prompts: int, beside: Policies | None = None, **engine: Any) -> Bench:
    """Return a bench with waiting requests named 0, 1, ...; from 2,049 to 8,192 is medium."""
    bench = Bench({**(beside or {}), "long_prompt": {}}, **(LARGE_STEP | engine))
    bench.add_all({str(number): tokens for number, tokens in enumerate(prompts)}, output=9)
    return bench


def test_mediums_enter_until_the_step_is_full_and_shorts_pass_the_others() -> None:
    bench = loaded(4_000, 4_100, 4_100, 4_100, 100)
    bench.play({"4": 100, "0": 4_000, "1": 4_092}, add("late", 50))
    bench.play({"4": 1, "0": 1, "1": 8, "late": 50, "2": 4_100, "3": 4_032})


def test_mediums_that_fill_the_next_step_too_hold_the_others() -> None:
    bench = loaded(*[5_000] * 4, **SMALL_STEP)
    bench.play({"0": 2_048}, add("chat", 60), {"0": 2_048}, {"0": 904, "chat": 60, "1": 1_084})


def test_shorter_mediums_enter_first() -> None:
    assert loaded(8_000, 7_000, 3_000, 4_000).entries() == ["2", "3", "0", "1"]


def test_mediums_keep_their_order_if_requests_have_priorities() -> None:
    assert loaded(8_000, 7_000, 3_000, 4_000, priority=True).entries() == ["0", "1", "2", "3"]


def test_medium_alone_has_whole_steps() -> None:
    loaded(8_000).play({"0": 8_000})
    loaded(5_000, **SMALL_STEP).play({"0": 2_048}, {"0": 2_048}, {"0": 904})


def test_medium_passes_a_long_prompt() -> None:
    bench = loaded(30_000)
    bench.play(decode("d"), add("medium", 4_000))
    assert bench.step()["medium"] == 4_000


def test_overdue_medium_enters_before_shorts_once_no_medium_is_in_prefill() -> None:
    bench = loaded(5_000, 5_000, **SMALL_STEP)
    bench.play(1, wait(61), add_all("abcdef", 600), {"0": 2_048})
    bench.play({"0": 904, "a": 600, "b": 544}, {"0": 1, "a": 1, "b": 56, "1": 1_990})


def test_overdue_medium_enters_before_other_mediums() -> None:
    bench = loaded(5_000, 8_000, **LARGE_STEP | {"budget": 6_000, "max_model_len": 204_800})
    bench.play(decode("d"), wait(61), add("late", 3_000))
    assert bench.step() == {"d": 1, "0": 1, "1": 5_998}


def test_shorts_enter_among_many_overdue_mediums() -> None:
    bench = loaded(*[5_000] * 30, **SMALL_STEP)
    bench.play(1, wait(61), add_all("abcdef", 60), 4)
    assert {*"abcdef"} <= bench.running


def test_medium_keeps_its_turn_if_slots_are_scarce() -> None:
    bench = loaded(max_num_seqs=2)
    bench.play(decode("d"), add("leaves", 3, output=4), 1, add("medium", 4_000), wait(1))
    bench.play(add_all("abc", 50), add("long", 20_000))
    assert bench.entries()[0] == "medium"


def test_medium_keeps_its_turn_if_kv_blocks_are_scarce() -> None:
    bench = loaded(num_blocks=300)
    bench.play(add("leaves", 2_000, output=9), decode("d"), add("medium", 3_000), 1)
    bench.play(wait(1), add_all("abc", 50))
    assert bench.entries() == ["medium", *"abc"]


def test_preempted_medium_enters_before_later_shorts() -> None:
    bench = loaded(5_000, **SMALL_STEP)
    bench.step()
    (request,) = bench.scheduler.running
    bench.preempt(request)
    bench.play(wait(1), add_all("ab", 50))
    assert bench.entries() == ["0", *"ab"]


def test_limit_on_chunks_leaves_no_tokens_of_a_step_unused() -> None:
    bench = loaded(*[1_000] * 5, budget=256, long_prefill_token_threshold=64)
    bench.play(dict.fromkeys("0123", 64))


def test_prompts_that_are_read_whole_are_not_medium() -> None:
    bench = loaded(8_000, 4_000, max_model_len=8_192, chunked_prefill=False)
    bench.play(
        add_all("abc", 150), {"0": 8_000}, {"0": 1, "1": 4_000, "a": 150, "b": 150, "c": 150}
    )


def test_long_keeps_its_chunk_if_a_medium_lacks_kv_blocks() -> None:
    bench = loaded(num_blocks=945)
    bench["long_prompt"].chunk_size = PinnedChunk(512)
    bench.play(add("d", 6_000, output=900), 1, add("long", 9_000), 9, add("medium", 5_000), 1)
    bench.play(add("short", 10), 1, *[{"d": 1, "short": 1, "long": 512}] * 3)


def test_shorts_that_enter_cost_no_look_ups_of_mediums(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prefix = loaded(prefix_caching=True, max_num_seqs=64), range(1, 10_001)
    bench.add("first", [*prefix, 7], output=1)
    bench.drain()
    bench.decode("d")
    bench.add_all({"a": [*prefix, *[8] * 3_000], "b": [*prefix, *[9] * 5_000]})
    bench.add_all({f"short{number}": 30 for number in range(50)})
    coordinator = bench.scheduler.kv_cache_manager.coordinator
    look_up, lengths = coordinator.find_longest_cache_hit, []
    monkeypatch.setattr(
        coordinator,
        "find_longest_cache_hit",
        lambda hashes, length: lengths.append(length) or look_up(hashes, length),
    )
    assert len(bench.step()) == 53
    assert sum(length > 10_000 for length in lengths) < 10


def test_medium_without_its_cached_tokens_counts_as_long() -> None:
    policy = LongPrompt(EngineFacts(32_000, 8_192, 8), LongPromptSettings())
    request = make_request(23_000)
    assert policy.lane(request, lambda: 20_000) == "medium/12"
    step = Step(index=1, now=0.0, budget=8_192, decode_tokens=1, prefills=(), free_slots=8)
    policy.begin_step(step, {})
    assert policy.chunk(request, computed=0, tokens=8_191) == 2_048


@pytest.mark.parametrize(("first", "second", "enters"), [
    ("batch", "normal", True), ("normal", "batch", False), ("normal", "normal", False),
])  # fmt: skip
def test_medium_of_a_lower_class_holds_none_of_a_higher_one(
    first: str, second: str, enters: bool
) -> None:
    bench = loaded(beside={"lanes": {}}, **SMALL_STEP)
    bench.play(add("first", 5_000, lane=first), 1, add("second", 5_000, lane=second), 1)
    assert ("second" in bench.running) is enters


@pytest.mark.parametrize(("tokens", "entering"), [(2_048, 4), (2_049, 1)])
def test_prompts_of_2048_tokens_are_short(tokens: int, entering: int) -> None:
    bench = loaded(4_000, 4_000, *[tokens] * 4)
    bench.step()
    assert len(bench.running - {"0", "1"}) == entering


def test_cached_tokens_do_not_count() -> None:
    bench, prefix = loaded(prefix_caching=True, **SMALL_STEP), range(1, 5_001)
    bench.add("first", [*prefix, 7], output=1)
    bench.drain()
    bench.add_all({name: [*prefix, number] for number, name in enumerate("abc", 10)})
    assert len(bench.step()) == 3


@pytest.mark.parametrize(("max_wait_s", "steps"), [(0.3, range(30, 33)), (1e6, range(200, 201))])
@pytest.mark.parametrize("ahead", [False, True])
def test_endless_shorts_pass_a_medium_until_its_bound(
    max_wait_s: float, steps: range, *, ahead: bool
) -> None:
    bench = Bench({"long_prompt": {"max_wait_s": max_wait_s}}, ahead=ahead, max_num_seqs=64)
    bench.decode("d")
    bench.add("medium", 75)
    count = 0
    while "medium" not in bench.running and count < 200:
        for number in range(12 - len(bench.scheduler.waiting)):
            bench.add(f"{count}.{number}", 30, output=1)
        bench.step()
        count += 1
    assert count in steps


@pytest.mark.parametrize("ahead", [False, True])
def test_mediums_are_served_beside_all_policies(*, ahead: bool) -> None:
    """With LoRA adapters, aborts, preemptions, and a cache for a few of them."""
    policies: dict[str, Any] = {
        "lanes": {}, "long_prompt": {"max_wait_s": 1.0}, "deferred_prefill": {},
        "rotation": {"chunk": 16}, "chunk_budget": {"chunk": 24},
    }  # fmt: skip
    bench = Bench(policies, ahead=ahead, num_blocks=40, max_num_seqs=6, max_loras=1)
    for number in range(60):
        lane = ("urgent", "normal", "batch")[number % 3]
        bench.add(str(number), 66 + number % 15, lane=lane, adapter=number % 4 // 2 + 1, output=5)
        bench.add(f"short {number}", 20, output=9)
        bench.steps(3)
        if number % 7 == 0:
            bench.abort(*sorted(bench.running)[:2])
    bench.drain()
