"""`long_prompt` on real scheduler objects: V0's cases, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.schedulers import answer, make_request, make_scheduler
from tests.policies.making import Bench, PinnedChunk, add, decode, wait
from vllm_sched import (
    LongPromptScheduler,
    PolicyScheduler,
    SyncLongPromptScheduler,
    SyncPolicyScheduler,
)
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.long_prompts.lookups import LengthLookups
from vllm_sched.policies.types import EngineFacts

Policies = dict[str, dict[str, object]]
ALL_PARTIAL = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}


def loaded(
    *prompts: int,
    chunk: int | None = None,
    settings: Mapping[str, object] | None = None,
    beside: Policies | None = None,
    **engine: Any,
) -> Bench:
    """Return a bench with waiting requests named 0, 1, ..., and a fixed chunk if one is given.

    With a budget of 64 and a context of 2,000, prompts above 80 tokens are long.
    """
    bench = Bench({**(beside or {}), "long_prompt": settings or {}}, **engine)
    if chunk is not None:
        bench["long_prompt"].chunk_size = PinnedChunk(chunk)
    bench.add_all({str(number): tokens for number, tokens in enumerate(prompts)})
    return bench


def longs_waiting(bench: Bench) -> int:
    """Return the number of requests that wait as long prompts."""
    counts = bench.scheduler.waiting.lane_counts.by_policy[[*bench.policies].index("long_prompt")]
    return sum(count.requests for lane, count in counts.items() if lane.startswith("long"))


# Who enters


def test_shorts_share_the_budget_and_one_long_has_all_of_it() -> None:
    loaded(60, 60, settings=ALL_PARTIAL).play({"0": 60, "1": 4}, {"0": 1, "1": 56})
    loaded(1200, 1200, settings=ALL_PARTIAL).play({"0": 64}, {"0": 64})


def test_shorts_pass_a_held_long() -> None:
    bench = loaded(1200, 1200, 40, 40, chunk=32, settings=ALL_PARTIAL)
    # A long leaves room for 80 tokens of shorts, as far as a quarter of the step remains.
    bench.play({"0": 16, "2": 40, "3": 8}, {"0": 16, "2": 1, "3": 32}, {"0": 32, "2": 1, "3": 1})
    assert len(bench.scheduler.waiting) == 1


def test_one_partial_prefill_turns_the_policy_off() -> None:
    assert loaded(settings={"max_num_partial_prefills": 1}).scheduler._policies == []


def test_next_long_enters_in_the_step_that_completes_the_first() -> None:
    loaded(200, 200).play(*[{"0": 64}] * 3, {"0": 8, "1": 56})


def test_shorter_long_enters_first_and_longs_of_one_size_keep_their_order() -> None:
    bench = loaded(300, 1900, 500, 150, chunk=64)
    bench["long_prompt"].chunk_size.token_s = 1.0
    assert bench.entries() == ["3", "0", "2", "1"]
    assert loaded(100, 200, 150, 130).entries() == ["0", "1", "2", "3"]


def test_long_that_has_waited_enters_before_a_shorter_one() -> None:
    bench = loaded(300, 1900, chunk=64)
    bench["long_prompt"].chunk_size.token_s = 0.001
    bench.play(1, wait(3), add("2", 150))  # 1,900 tokens take less
    assert bench.entries() == ["1", "2"]


def test_priority_decides_within_each_lane() -> None:
    bench = loaded(900, priority=True)
    bench.step()
    for name, priority in (("late", 5), ("soon", 1), ("first", 0)):
        bench.add(f"long-{name}", 500, priority=priority)
        bench.add(f"short-{name}", 70, priority=priority)
    order = bench.entries()
    for kind in ("long", "short"):
        names = [name for name in order if name.startswith(kind)]
        assert names == [f"{kind}-{name}" for name in ("first", "soon", "late")]
    assert order.index("short-late") < order.index("long-soon")


def test_overdue_longs_take_at_most_all_partial_prefills() -> None:
    bench = loaded(*[1900] * 8, settings={"max_wait_s": 5}, budget=256)
    bench.play(1, wait(6), 6)
    assert len(bench.running) == 4
    bench.drain()


# Longs without room


def test_longs_without_room_have_no_part_of_the_chunk() -> None:
    settings = {"max_long_partial_prefills": 4}
    bench = loaded(chunk=64, settings=settings, num_blocks=90, budget=256)
    bench.play(decode("d"), add("long", 900), 1, *(add(f"stuck{n}", 1500) for n in range(3)), 2)
    bench.play(*[{"d": 1, "long": 64}] * 4)


def world(beside: Policies | None = None, *, chunk: int | None = None) -> Bench:
    """Return a bench with few KV blocks, in which four requests decode."""
    settings = {"long_prefill_token_threshold": 2000}
    bench = loaded(
        chunk=chunk, settings=settings, beside=beside, budget=512, max_model_len=16_000,
        num_blocks=490,
    )  # fmt: skip
    bench.add_all({f"chat {number}": 600 for number in range(4)}, output=400)
    bench.steps(8)
    return bench


def free_tokens(bench: Bench) -> int:
    return int(bench.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * 16)


def lack_blocks(bench: Bench) -> None:
    """Run until a short waits for KV blocks behind a long prompt."""
    bench.add("long", 5000)
    bench.until(lambda: free_tokens(bench) < 2900)
    bench.play(add("short", 1990), 1)  # the long needs the blocks


def test_long_has_its_whole_chunk_while_a_short_lacks_blocks() -> None:
    bench = world(chunk=128)
    lack_blocks(bench)
    assert [step["long"] for step in bench.steps(5)] == [128] * 5
    assert "short" not in bench.running
    # A comparison has half a chunk.
    bench = world()
    lack_blocks(bench)
    usual = bench["long_prompt"].chunk_size.tokens
    assert {step["long"] for step in bench.steps(3)} == {usual // 2, min(usual, 508)}


def test_urgent_short_passes_a_normal_one_that_lacks_blocks() -> None:
    bench = world({"lanes": {}}, chunk=512)  # would leave nothing
    lack_blocks(bench)
    bench.play(1, add("urgent", 100, lane="urgent"), 1)
    assert "short" not in bench.running
    assert "urgent" in bench.running


def test_preempted_long_is_not_the_first_victim_again_and_its_answer_goes_first() -> None:
    bench = loaded(1200, 60, budget=32)
    bench.step()
    long, short = (bench.scheduler.requests[name] for name in "01")
    policy = bench["long_prompt"]
    assert policy.rank(long) > policy.rank(short)
    long.num_preemptions = 1
    assert policy.rank(long) == policy.rank(short)
    assert policy.lane(long, lambda: 0) == "long/11"
    # Otherwise shorts would pass the answer, and take its KV blocks.
    long.append_output_token_ids([7])
    assert policy.rank(long) < policy.rank(short)
    assert policy.lane(long, lambda: 0) == "short"


# Look-ups of cached prefixes


def with_document(policies: Policies, tokens: int, **engine: Any) -> tuple[Bench, list[int]]:
    """Return a bench whose KV cache has a document, and the document."""
    bench = Bench(policies, **{"prefix_caching": True, "max_model_len": 20_000, **engine})
    document = list(range(10, 10 + tokens))
    bench.add("document", document, output=1)
    bench.drain()
    return bench, document


def lookups_of(bench: Bench) -> list[int]:
    """Return a list that records the blocks of each prefix cache lookup."""
    coordinator = bench.scheduler.kv_cache_manager.coordinator
    lookup = coordinator.find_longest_cache_hit
    lookups: list[int] = []

    def counted(*arguments: Any) -> Any:
        lookups.append(len(arguments[0]))
        return lookup(*arguments)

    coordinator.find_longest_cache_hit = counted
    return lookups


def evict_all(bench: Bench) -> None:
    """Evict all blocks that no request holds."""
    pool = bench.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))


def test_cached_prefix_does_not_count_as_length() -> None:
    bench, document = with_document({"long_prompt": {}}, 1200, max_model_len=2000)
    bench.play(add("long", 1200), 1)
    bench.add("cached", [*document, *[3] * 40])
    assert bench.step()["cached"] > 0
    assert longs_waiting(bench) == 0


def test_prefix_is_looked_up_once_without_changes() -> None:
    bench, document = with_document({"long_prompt": {}}, 500)
    lookups, prefixes = lookups_of(bench), bench.scheduler._planner.prefixes
    request = bench.add("r", [*document, *[3] * 400])
    lookups.clear()
    bench.scheduler.current_step += 1
    assert [prefixes.cached_tokens(request) for _ in range(3)] == [496] * 3
    assert len(lookups) == 1
    assert prefixes.blocks_read % (496 // 16) == 0
    # Taken blocks may have evicted the prefix.
    pool = bench.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 9)
    assert prefixes.cached_tokens(request) < 496
    assert len(lookups) == 2


def test_prefix_is_not_looked_up_in_each_step_without_a_free_slot() -> None:
    bench, document = with_document({"long_prompt": {}}, 500, max_num_seqs=2, max_model_len=2000)
    bench.decode("d", "e", output=40)
    lookups = lookups_of(bench)
    bench.play(lambda bench: bench.add("cached", [*document, 3]), 30)
    assert len(lookups) == 1
    # It is looked up before it enters.
    bench.until(lambda: "cached" in bench.running, max_steps=100)
    assert len(lookups) > 1


def beside_a_long(more: Policies) -> tuple[Bench, list[int]]:
    """Return a bench with a long prefill in half of each step, and a cached document."""
    bench, document = with_document({"long_prompt": {"long_prefill_share": 0.5}, **more}, 1600)
    bench.play(add("d", 8, output=2000), add("long", 19_000))
    assert len(bench.step()) == 2
    return bench, document


@pytest.mark.parametrize(
    ("rest", "beside"), [(1700, {}), (1000, {}), (1700, {"deferred_prefill": {"departures": 2}})]
)
def test_largely_cached_request_is_looked_up_at_intervals(rest: int, beside: Policies) -> None:
    bench, document = beside_a_long(beside)
    lookups = lookups_of(bench)
    held = bench.add("held", [*document, *[3] * rest], output=1)
    seen = set()
    for number in range(100):
        if number % 4 == 0:
            bench.add(f"s{number}", 100, output=1)
        bench.step(0.0008)
        seen.add(tuple(r.request_id for r in bench.scheduler.running if r.is_prefill_chunk))
    assert len(seen) > 20
    assert "held" not in bench.running
    # 1,600 cached tokens are looked up every 8 ms, ten times here, once at the arrival, and for
    # each policy.
    looks = sum(blocks == len(held.block_hashes) for blocks in lookups)
    assert 5 <= looks <= 11 * (1 + len(beside))


def behind_a_normal_prompt() -> tuple[Bench, Any]:
    """Return a bench with a stopped batch prompt, a normal prompt and a held batch request.

    The held request is short, because its prefix is cached.
    """
    policies: Policies = {"long_prompt": {}, "lanes": {"reserve_slots": 0.0}}
    bench, document = with_document(policies, 1600)
    bench.play(add("batch", 19_000, priority=1), 1, add("normal", 19_000))
    held = bench.add("held", [*document, *[3] * 100], output=1, priority=1)
    assert bench.step().keys() == {"normal"}
    return bench, held


def test_short_request_held_by_lanes_is_looked_up_at_intervals() -> None:
    bench, held = behind_a_normal_prompt()
    lookups = lookups_of(bench)
    for _ in range(100):
        bench.step(0.0008)
    assert held in bench.scheduler.waiting
    # Once in 8 ms.
    assert 5 <= lookups.count(len(held.block_hashes)) <= 11
    # It enters as soon as it may; batch's share of one step goes to the earlier prompt.
    bench.abort("normal")
    assert [step.keys() for step in bench.steps(2)] == [{"batch"}, {"batch", "held"}]


def test_formerly_short_request_is_looked_up_before_it_enters() -> None:
    bench, _ = behind_a_normal_prompt()
    evict_all(bench)
    bench.abort("normal")
    assert all(step.keys() == {"batch"} for step in bench.steps(20))
    assert longs_waiting(bench) == 1
    bench.abort("batch")
    assert bench.step().keys() == {"held"}
    assert "held" not in bench["long_prompt"]._lookups._by_request


def test_longs_of_one_step_leave_no_lookups() -> None:
    bench = loaded(*[100] * 3, budget=128, settings=ALL_PARTIAL)
    bench.drain()
    assert not any(bench["long_prompt"]._lookups.was_long(str(number)) for number in range(3))


@pytest.mark.parametrize(
    ("policies", "longs", "others"),
    [
        ({"long_prompt": {}, "rotation": {}}, 1, []),
        ({"long_prompt": {}, "deferred_prefill": {}}, 1, []),
        ({"long_prompt": {}, "lanes": {}}, 1, [(20, 0), (20, -1), (20, -1)]),
        ({"long_prompt": {"max_long_partial_prefills": 2}}, 2, [(19_000, 0)]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_request_with_an_evicted_prefix_does_not_enter_as_short(
    policies: Policies, longs: int, others: list[tuple[int, int]]
) -> None:
    """Nor in the step in which the eviction was found."""
    bench, document = with_document(policies, 8000, max_num_seqs=4, num_blocks=8000)
    bench.play(decode("d", "e", "f"), 1, add("long", 19_000), 1)
    bench.add("question", [*document, *[3] * 20], output=1)
    for _ in range(3):
        bench.step(0.001)
    assert len(bench.running) == 4  # a slot is free
    evict_all(bench)
    for number, (tokens, priority) in enumerate(others):
        bench.add(str(number), tokens, output=1, priority=priority)
    bench.abort("d", "e", "f")
    for _ in range(5):
        assert "question" not in bench.step(0.001)
        assert bench["long_prompt"].gauges()["long_prefills"] <= longs


# The size of a long prompt's chunk


def test_decodes_precede_an_earlier_long_prompt_which_gets_its_chunk() -> None:
    bench = loaded(1200, 8, chunk=100, budget=512)
    bench.play(1, {"1": 1, "0": 100})
    assert [r.request_id for r in bench.scheduler.running] == ["1", "0"]


def test_long_is_cut_for_a_while_after_the_last_short() -> None:
    bench = loaded(1900, chunk=100, budget=512)
    bench.play(add("short", 50, output=1), {"0": 50, "short": 50})
    bench.play(wait(0.9), {"0": 100}, wait(0.2), {"0": 512})


@pytest.mark.parametrize(("short", "long"), [(30, 70), (90, 50), (600, 50)])
def test_long_yields_up_to_half_of_its_chunk_to_shorts(short: int, long: int) -> None:
    bench = loaded(chunk=100, settings={"long_prefill_token_threshold": 700}, budget=512)
    bench.play(decode("d"), add("long", 1200), add("short", short))
    bench.play({"d": 1, "long": long, "short": min(short, 511 - long)})


def test_shorts_leave_a_long_a_quarter_of_the_step() -> None:
    bench = loaded(chunk=64, budget=65)
    bench.play(decode("d"), add("long", 1900), 1)
    bench.add_all({f"s{number}": 80 for number in range(20)}, output=1)
    for got in bench.steps(10):
        assert got["long"] >= 16
        assert sum(got.values()) == 65


@pytest.mark.parametrize("shorts", [1, 3])
def test_short_has_its_part_with_many_decodes(shorts: int) -> None:
    bench = loaded(chunk=64, max_num_seqs=64)
    bench.add_all({f"d{number}": 4 for number in range(50)}, output=500)
    bench.until(lambda: sum(not r.is_prefill_chunk for r in bench.scheduler.running) == 50)
    bench.add("long", 1500)
    assert bench.step()["long"] == 14
    bench.add_all({f"s{number}": 3 for number in range(shorts)})
    got = bench.step()
    # The decodes leave 14 tokens for the long prompt and the shorts.
    assert (got["long"], got["s0"]) == (14 - 3 * shorts, 3)


def test_rest_of_a_long_is_cut_too() -> None:
    """Otherwise the last tokens below the threshold would be one slow step."""
    bench = loaded(chunk=100, settings={"long_prefill_token_threshold": 300}, budget=512)
    bench.play(decode("d"), add("long", 350), *[{"d": 1, "long": 100}] * 3, {"d": 1, "long": 50})


def test_longs_divide_the_chunk() -> None:
    bench = loaded(chunk=100, settings={"max_long_partial_prefills": 2}, budget=512)
    bench.play(decode("d"), add("a", 1200), add("b", 1200), 1, {"d": 1, "a": 50, "b": 50})


def test_steps_with_fewer_tokens_than_prefills_are_not_empty() -> None:
    settings = {"max_long_partial_prefills": 8}
    bench = loaded(*[1200] * 8, settings=settings, budget=5, max_num_seqs=5)
    assert all(bench.steps(20))


def test_long_does_not_yield_to_shorts_without_a_slot() -> None:
    bench = loaded(chunk=100, budget=512, max_num_seqs=2)
    bench.play(decode("d"), add("long", 1900), 1, add("s", 50), *[{"d": 1, "long": 100}] * 3)


def test_chunk_is_sized_by_the_measured_steps() -> None:
    """A step takes 10 ms and 1 ms for each 10 tokens: chunks of 512 lose nothing notable."""
    bench = loaded(budget=2048, max_model_len=100_000, num_blocks=8000)
    bench.play(decode("d", output=2000), add("long", 90_000, output=1))
    policy, scheduler = bench["long_prompt"], bench.scheduler
    while "long" in scheduler.requests:
        output = scheduler.schedule()
        bench.now += 0.01 + 1e-4 * output.num_scheduled_tokens.get("long", 0)
        scheduler.update_from_output(output, answer(scheduler, output))
        assert bench.now < 1100
    # Half of 2,048 tokens take 5 % longer in all, half of 1,024 take 9 %.
    assert policy.chunk_size.tokens == policy.gauges()["long_chunk_tokens"] == 1024


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_fixed_share_limits_the_chunk(share: float) -> None:
    bench = loaded(settings={"long_prefill_share": share}, budget=512)
    bench.play(decode("d"), add("long", 1200), {"d": 1, "long": min(512 * share, 511)})


@pytest.mark.parametrize(("share", "tokens"), [(0.25, 8), (0.01, 1)])
def test_fixed_share_is_divided_among_longs_and_overdue_longs(share: float, tokens: int) -> None:
    bench = loaded(1900, 1900, settings={"long_prefill_share": share, "max_wait_s": 5})
    bench.play(decode("d"), 1, wait(6), {"d": 1, "0": tokens, "1": tokens})


# Scheduler classes


@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_scheduler_without_policies_uses_upstreams_queue(kind: type) -> None:
    scheduler = make_scheduler(scheduler_cls=kind)
    assert not isinstance(scheduler.waiting, LaneQueue)
    assert scheduler._policies == []


@pytest.mark.parametrize("kind", [LongPromptScheduler, SyncLongPromptScheduler])
@pytest.mark.parametrize("given", [{}, {"long_prompt": {"max_long_partial_prefills": 8}}], ids=str)
def test_long_prompt_schedulers_enable_the_policy(kind: type, given: Policies) -> None:
    (policy,) = make_scheduler(given, scheduler_cls=kind)._policies
    assert policy.name == "long_prompt"
    assert policy.settings.max_long_partial_prefills == (8 if given else 1)


def test_policies_are_logged_in_one_line_and_former_settings_as_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="vllm.vllm_sched"):
        make_scheduler({"long_prompt": {"long_step_stretch": 6}})
    warning, line = [r for r in caplog.records if "long_prompt" in r.message]
    assert ": PolicyScheduler, policies: " in line.message
    assert (
        "long_prompt(long_prefill_token_threshold=80, max_long_partial_prefills=1, " in line.message
    )
    assert warning.levelname == "WARNING"
    assert "long_prompt.long_step_stretch" in warning.message
    assert "see itl_ms" in warning.message


def test_longs_enter_in_order_until_step_times_are_known() -> None:
    assert loaded(1900, 150).entries() == ["0", "1"]


def test_waiting_short_without_a_slot_does_not_cut_a_long() -> None:
    bench = loaded(1900, chunk=100, budget=512, max_num_seqs=1)
    bench.play({"0": 512}, add("short", 50), {"0": 512})


@pytest.mark.parametrize(
    ("cached", "lane"),
    [
        (0, "long/7"), (19, "long/7"), (20, "medium/7"), (35, "medium/7"), (36, "short"),
        (100, "short"),
    ],
)  # fmt: skip
def test_lane_is_that_of_the_tokens_left(cached: int, lane: str) -> None:
    lookups, prompt = LengthLookups(EngineFacts(2_000, 64, 8), threshold=0), make_request(100)
    assert lookups.lane(prompt, lambda: cached, 0.0) == lane
    assert lookups.was_long(prompt.request_id) is lane.startswith("long")
    assert lookups.was_medium(prompt.request_id) is lane.startswith("medium")
    assert lookups.is_still_short(prompt) is (lane == "short")


def test_prompt_that_is_short_without_cached_tokens_is_not_looked_up() -> None:
    lookups = LengthLookups(EngineFacts(2_000, 64, 8), threshold=0)
    assert lookups.lane(make_request(64), pytest.fail, 0.0) == "short"


@pytest.mark.parametrize(
    ("context", "budget", "threshold", "bounds"),
    [
        (131_072, 2_048, 0, (2_048, 5_242)),
        (131_072, 8_192, 0, (2_048, 8_192)),
        (131_072, 512, 0, (512, 5_242)),
        (1_048_576, 2_048, 0, (2_048, 8_192)),
        (1_048_576, 16_384, 0, (2_048, 16_384)),
        (8_192, 8_192, 0, (2_048, 8_192)),
        (131_072, 8_192, 1_000, (1_000, 1_000)),
    ],
)
def test_bounds_of_short_and_long(
    context: int, budget: int, threshold: int, bounds: tuple[int, int]
) -> None:
    lookups = LengthLookups(EngineFacts(context, budget, 8), threshold)
    assert (lookups.max_short, lookups.threshold) == bounds


def test_long_of_a_class_that_has_the_whole_step_keeps_its_chunk() -> None:
    bench = loaded(chunk=400, beside={"lanes": {}}, budget=512)
    bench.play(decode("d"), add("long", 1200), 1, add("short", 30))
    bench.play({"d": 1, "long": 370, "short": 30})
