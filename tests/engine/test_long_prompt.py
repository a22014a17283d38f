"""`long_prompt` on real scheduler objects: V0's cases, and others."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import answer, drain, make_request, make_scheduler, step, until
from tests.policies.making import PinnedChunk
from vllm_sched import (
    LongPromptScheduler,
    PolicyScheduler,
    SyncLongPromptScheduler,
    SyncPolicyScheduler,
)
from vllm_sched.engine.scheduler import PolicySteps
from vllm_sched.engine.waiting.queue import LaneQueue

V0 = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}


def loaded(*prompts: int, options: dict[str, Any] | None = None, **engine: Any) -> Any:
    """Return a scheduler with waiting requests named 0, 1, ..."""
    scheduler = make_scheduler({"long_prompt": V0 if options is None else options}, **engine)
    for name, tokens in enumerate(prompts):
        scheduler.add_request(make_request(tokens, name=str(name)))
    return scheduler


def policy(scheduler: Any) -> Any:
    """Return the `long_prompt` policy of a scheduler."""
    return next(each for each in scheduler._policies if each.name == "long_prompt")


def longs_waiting(scheduler: Any) -> int:
    """Return the number of requests that wait as long prompts."""
    counts = scheduler.waiting.counts[scheduler._policies.index(policy(scheduler))]
    return sum(count.requests for lane, count in counts.items() if lane.startswith("long"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose item is the time."""
    now = [1000.0]
    monkeypatch.setattr(PolicySteps, "clock", lambda _: now[0])
    return now


# V0's cases: budget 64, max_model_len 2000 so that above 80 tokens is long, M = 1


def test_two_shorts_share_the_budget() -> None:
    scheduler = loaded(60, 60)
    assert step(scheduler) == {"0": 60, "1": 4}
    assert step(scheduler) == {"0": 1, "1": 56}


def test_one_of_two_longs_gets_the_whole_budget() -> None:
    scheduler = loaded(1200, 1200)
    assert step(scheduler) == {"0": 64}
    assert step(scheduler) == {"0": 64}


def test_shorts_pass_a_held_long() -> None:
    scheduler = loaded(1200, 1200, 40, 40)
    policy(scheduler).size = PinnedChunk(32)
    # A long leaves room for 80 tokens of shorts, as far as a quarter of the step remains.
    assert step(scheduler) == {"0": 16, "2": 40, "3": 8}
    assert step(scheduler) == {"0": 16, "2": 1, "3": 32}
    assert step(scheduler) == {"0": 32, "2": 1, "3": 1}
    assert len(scheduler.waiting) == 1


def test_one_partial_prefill_disables_the_limits() -> None:
    with_policy = loaded(1200, 1200, 40, options={"max_num_partial_prefills": 1})
    upstream = make_scheduler(None)
    for name, tokens in enumerate((1200, 1200, 40)):
        upstream.add_request(make_request(tokens, name=str(name)))
    for _ in range(60):
        assert step(with_policy) == step(upstream)


# Cases beyond V0


def test_decodes_precede_an_earlier_long_prompt() -> None:
    scheduler = loaded(1200, 8, options={})
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["0", "1"]
    scheduled = step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["1", "0"]
    assert scheduled["1"] == 1


def test_next_long_enters_in_the_step_that_completes_the_first() -> None:
    scheduler = loaded(200, 200)
    got = [step(scheduler) for _ in range(4)]
    assert got == [{"0": 64}, {"0": 64}, {"0": 64}, {"0": 8, "1": 56}]


@pytest.mark.usefixtures("clock")
def test_shorter_long_enters_first() -> None:
    scheduler = loaded(300, 1900, 500, 150, options={})
    size = policy(scheduler).size = PinnedChunk(64)
    size.token_s = 0.001
    order = admissions(scheduler)
    assert order == ["3", "0", "2", "1"]


def test_long_that_has_waited_enters_before_a_shorter_one(clock: list[float]) -> None:
    scheduler = loaded(300, 1900, options={})
    size = policy(scheduler).size = PinnedChunk(64)
    size.token_s = 0.001
    step(scheduler)
    clock[0] += 3  # 1,900 tokens take less
    scheduler.add_request(make_request(150, name="2"))
    assert admissions(scheduler) == ["1", "2"]


def test_any_number_of_shorts_pass_any_number_of_longs() -> None:
    scheduler = loaded(*[1200] * 50, *[10] * 5)
    step(scheduler)
    step(scheduler)
    assert {r.request_id for r in scheduler.running} == {"0", "50", "51", "52", "53", "54"}


def admissions(scheduler: Any) -> list[str]:
    """Run all requests; return their names in the order of admission."""
    order: list[str] = []
    for _ in range(2000):
        if not scheduler.has_unfinished_requests():
            return order
        before = {r.request_id for r in scheduler.running}
        step(scheduler)
        order += [r.request_id for r in scheduler.running if r.request_id not in before]
    raise AssertionError("requests never ended")


def test_held_longs_of_one_size_keep_their_order() -> None:
    assert admissions(loaded(100, 200, 150, 130, options={})) == ["0", "1", "2", "3"]


def test_cached_prefix_does_not_count_as_length() -> None:
    scheduler = loaded(options={}, prefix_caching=True)
    document = list(range(10, 1210))
    scheduler.add_request(make_request(document, name="first", output=1))
    drain(scheduler)
    scheduler.add_request(make_request(1200, name="long"))
    step(scheduler)
    scheduler.add_request(make_request([*document, *[3] * 40], name="cached"))
    assert step(scheduler)["cached"] > 0
    assert longs_waiting(scheduler) == 0


def lookups_of(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the blocks of each prefix cache lookup."""
    coordinator = scheduler.kv_cache_manager.coordinator
    lookup = coordinator.find_longest_cache_hit
    lookups: list[int] = []

    def counted(*arguments: Any) -> Any:
        lookups.append(len(arguments[0]))
        return lookup(*arguments)

    monkeypatch.setattr(coordinator, "find_longest_cache_hit", counted)
    return lookups


def lookups_while_held(
    scheduler: Any, held: Any, clock: list[float], monkeypatch: pytest.MonkeyPatch, steps: int
) -> int:
    """Return the lookups of a waiting request within 80 ms of steps."""
    lookups = lookups_of(scheduler, monkeypatch)
    for _ in range(steps):
        clock[0] += 0.08 / steps
        step(scheduler)
    assert held in scheduler.waiting
    return lookups.count(len(held.block_hashes))


def test_prefix_is_looked_up_once_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = loaded(options={}, prefix_caching=True, budget=256)
    document = list(range(10, 510))
    scheduler.add_request(make_request(document, output=1))
    drain(scheduler)
    lookups = lookups_of(scheduler, monkeypatch)
    request = make_request([*document, *[3] * 400])
    assert [scheduler._planner.prefixes.tokens(request) for _ in range(3)] == [496] * 3
    assert len(lookups) == 1
    assert scheduler._planner.prefixes.blocks_read == 496 // 16
    # Taken blocks may have evicted the prefix.
    scheduler.kv_cache_manager.block_pool.get_new_blocks(2_490)
    assert scheduler._planner.prefixes.tokens(request) < 496
    assert len(lookups) == 2


def test_prefix_is_not_looked_up_in_each_step_without_a_free_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = loaded(options={}, prefix_caching=True, budget=256, max_num_seqs=2)
    document = list(range(10, 510))
    scheduler.add_request(make_request(document, output=1))
    drain(scheduler)
    for _ in range(2):
        scheduler.add_request(make_request(8, output=40))
    step(scheduler)
    lookups = lookups_of(scheduler, monkeypatch)
    scheduler.add_request(make_request([*document, 3], name="cached"))
    for _ in range(30):
        step(scheduler)
    assert len(lookups) == 1
    # It is looked up before it enters.
    for _ in range(100):
        if "cached" in step(scheduler):
            break
    else:
        pytest.fail("the request never entered")
    assert len(lookups) > 1


def test_held_request_enters_once_its_prefix_is_cached() -> None:
    scheduler = loaded(options={}, prefix_caching=True, budget=256)
    document = list(range(10, 810))
    for name in "abc":
        scheduler.add_request(make_request([*document, ord(name)], name=name, output=2))
    for _ in range(3):
        assert set(step(scheduler)) == {"a"}
    # 32 tokens of the first are left; the others find 50 blocks of 16 tokens cached.
    until(scheduler, lambda: "b" in {r.request_id for r in scheduler.running})
    assert {r.request_id for r in scheduler.running} >= {"b", "c"}
    drain(scheduler)


def beside_a_long(more: dict[str, dict[str, object]]) -> tuple[Any, list[int]]:
    """Return a scheduler with a long prefill in half of each step, and a cached document."""
    policies: dict[str, dict[str, object]] = {"long_prompt": {"long_prefill_share": 0.5}, **more}
    scheduler = make_scheduler(policies, prefix_caching=True, budget=64, max_model_len=20_000)
    document = list(range(10, 1610))
    scheduler.add_request(make_request(document, output=1))
    drain(scheduler)
    scheduler.add_request(make_request(8, output=2000))
    scheduler.add_request(make_request(19_000))
    assert len(step(scheduler)) == 2
    return scheduler, document


@pytest.mark.parametrize("rest", [1700, 1000])
@pytest.mark.parametrize("beside", [{}, {"deferred_prefill": {"departures": 2}}], ids="+".join)
def test_largely_cached_request_is_looked_up_at_intervals(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    beside: dict[str, dict[str, object]],
    rest: int,
) -> None:
    scheduler, document = beside_a_long(beside)
    lookups = lookups_of(scheduler, monkeypatch)
    held = make_request([*document, *[3] * rest], name="held", output=1)
    scheduler.add_request(held)
    seen = set()
    for number in range(100):
        clock[0] += 0.0008
        if number % 4 == 0:
            scheduler.add_request(make_request(100, output=1))
        step(scheduler)
        seen.add(tuple(r.request_id for r in scheduler.running if r.is_prefill_chunk))
    assert len(seen) > 20
    assert "held" not in {r.request_id for r in scheduler.running}
    # 1,600 cached tokens are looked up every 8 ms, ten times here, once at the arrival, and for
    # each policy.
    looks = sum(blocks == len(held.block_hashes) for blocks in lookups)
    assert 5 <= looks <= 11 * (1 + len(beside))


def test_largely_cached_request_is_looked_up_once_after_the_last_change(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, document = beside_a_long({})
    held = make_request([*document, *[3] * 1700], name="held", output=1)
    scheduler.add_request(held)
    step(scheduler)
    scheduler.add_request(make_request(100, output=1))  # comes and goes
    lookups = lookups_of(scheduler, monkeypatch)
    for _ in range(20):
        step(scheduler)
    assert len(held.block_hashes) not in lookups
    clock[0] += 0.0081
    for _ in range(20):
        step(scheduler)
    assert lookups.count(len(held.block_hashes)) == 1


def behind_a_normal_prompt() -> tuple[Any, Any]:
    """Return a scheduler with a stopped batch prompt, a normal prompt and a held batch request.

    The held request is short, because its prefix is cached.
    """
    policies: dict[str, dict[str, object]] = {"long_prompt": {}, "lanes": {"reserve_slots": 0.0}}
    scheduler = make_scheduler(policies, prefix_caching=True, budget=64, max_model_len=20_000)
    document = list(range(10, 1610))
    scheduler.add_request(make_request(document, output=1))
    drain(scheduler)
    scheduler.add_request(make_request(19_000, name="batch", priority=1))
    step(scheduler)
    scheduler.add_request(make_request(19_000, name="normal"))
    held = make_request([*document, *[3] * 100], name="held", output=1, priority=1)
    scheduler.add_request(held)
    assert step(scheduler).keys() == {"normal"}
    return scheduler, held


def test_short_request_held_by_lanes_is_looked_up_at_intervals(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, held = behind_a_normal_prompt()
    # Once in 8 ms.
    assert 5 <= lookups_while_held(scheduler, held, clock, monkeypatch, 100) <= 11
    # It enters as soon as it may; batch's share of one step goes to the earlier prompt.
    scheduler.finish_requests("normal", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler).keys() == {"batch"}
    assert step(scheduler).keys() == {"batch", "held"}


@pytest.mark.usefixtures("clock")
def test_formerly_short_request_is_looked_up_before_it_enters() -> None:
    scheduler, _ = behind_a_normal_prompt()
    # Other requests have evicted its blocks.
    pool = scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    scheduler.finish_requests("normal", RequestStatus.FINISHED_ABORTED)
    for _ in range(20):
        assert step(scheduler).keys() == {"batch"}
    assert longs_waiting(scheduler) == 1
    scheduler.finish_requests("batch", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler).keys() == {"held"}
    assert "held" not in policy(scheduler)._lookups._found


DOCUMENT = list(range(10, 8010))


def with_evicted_document(
    policies: dict[str, dict[str, object]], clock: list[float], *waiting: Any
) -> Any:
    """Return a scheduler with free slots, waiting requests and an evicted document."""
    scheduler = make_scheduler(
        policies, prefix_caching=True, max_model_len=20_000, max_num_seqs=4, num_blocks=8000
    )
    scheduler.add_request(make_request(DOCUMENT, output=1))
    drain(scheduler)
    decodes = [make_request(20, output=400) for _ in range(3)]
    for request in decodes:
        scheduler.add_request(request)
    until(scheduler, lambda: len(scheduler.running) == 3)
    step(scheduler)
    scheduler.add_request(make_request(19_000, name="long"))
    step(scheduler)
    for request in waiting:
        scheduler.add_request(request)
    for _ in range(3):
        step(scheduler)
        clock[0] += 0.001
    assert len(scheduler.running) == 4
    pool = scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    for request in decodes:
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    return scheduler


def question(name: str, *, priority: int = 0) -> Any:
    """Return a request that is short while the document is cached."""
    prompt = [*DOCUMENT, *[3] * 20, priority + 7]
    return make_request(prompt, name=name, output=1, priority=priority)


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
    clock: list[float],
    policies: dict[str, dict[str, object]],
    longs: int,
    others: list[tuple[int, int]],
) -> None:
    """Nor in the step in which the eviction was found."""
    behind = [make_request(tokens, output=1, priority=priority) for tokens, priority in others]
    scheduler = with_evicted_document(policies, clock, question("question"), *behind)
    for _ in range(5):
        assert "question" not in step(scheduler)
        clock[0] += 0.001
        assert policy(scheduler).gauges()["long_prefills"] <= longs


def test_request_of_another_lane_with_the_evicted_prefix_stays_held(clock: list[float]) -> None:
    two = question("urgent", priority=-1), question("normal")
    scheduler = with_evicted_document({"long_prompt": {}, "lanes": {}}, clock, *two)
    for _ in range(4):
        assert "normal" not in step(scheduler)
        clock[0] += 0.001
        # A prompt of a higher lane may pass a long prompt of a lower one.
        assert policy(scheduler).gauges()["long_prefills"] <= 2


def test_short_request_without_room_is_looked_up_at_intervals(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(
        {"long_prompt": {}, "rotation": {}},
        prefix_caching=True,
        budget=40,
        max_model_len=7000,
        num_blocks=450,
    )
    document = list(range(10, 5010))
    for request in (
        make_request(document, output=1),
        make_request([*document, 1, 2, 3], output=2000),  # so that it stays in the cache
    ):
        scheduler.add_request(request)
        until(scheduler, lambda r=request: r.num_output_tokens)
    scheduler.add_request(make_request(1800, output=1))
    step(scheduler)
    held = make_request([*document, *[3] * 20], output=1)
    scheduler.add_request(held)
    # Once in 25 ms.
    assert 2 <= lookups_while_held(scheduler, held, clock, monkeypatch, 40) <= 5


def test_longs_of_one_step_leave_no_lookups() -> None:
    scheduler = loaded(*[100] * 3, budget=128)
    drain(scheduler)
    assert not any(str(number) in policy(scheduler)._lookups for number in range(3))


def test_request_with_remote_kv_is_never_long() -> None:
    remote = make_request(1200, name="remote")
    remote.kv_transfer_params = {"do_remote_prefill": True}
    connected, alone = loaded(connector="SimulatedConnector"), loaded()
    assert connected._planner.admission.lanes_of(remote) == ("short",)
    assert alone._planner.admission.lanes_of(remote) == ("long/11",)


@pytest.mark.parametrize("claim", [{"do_remote_prefill": True}, "x", [1]])
def test_kv_transfer_params_are_ignored_without_a_connector(claim: Any) -> None:
    scheduler = loaded(1200, 1200)
    for name in "ab":
        request = make_request(1200, name=name)
        request.kv_transfer_params = claim
        scheduler.add_request(request)
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["0"]


def test_wait_of_a_held_long_is_bounded_under_many_shorts(clock: list[float]) -> None:
    scheduler = loaded(1990, 1200, options={"max_wait_s": 5}, budget=128, max_num_seqs=64)
    number = 0
    while clock[0] < 1004.5:
        clock[0] += 0.5
        for _ in range(4):
            scheduler.add_request(make_request(60, name=f"s{number}", output=2))
            number += 1
        step(scheduler)
        assert "1" not in {r.request_id for r in scheduler.running}
    clock[0] = 1005.1
    step(scheduler)
    assert {"0", "1"} <= {r.request_id for r in scheduler.running}


def test_overdue_longs_take_at_most_all_partial_prefills(clock: list[float]) -> None:
    scheduler = loaded(*[1900] * 8, options={"max_wait_s": 5}, budget=256)
    step(scheduler)
    clock[0] += 6
    for _ in range(6):
        step(scheduler)
    assert len(scheduler.running) == 4
    drain(scheduler)


def test_clock_that_jumps_back_does_not_block_a_wait(clock: list[float]) -> None:
    scheduler = loaded(1200, 1200)
    step(scheduler)
    clock[0] = 0.0
    drain(scheduler)


def test_long_without_room_lets_shorts_pass() -> None:
    # 64 blocks hold 1,024 tokens, without room for the second long.
    scheduler = loaded(options={}, num_blocks=65, budget=256)
    scheduler.add_request(make_request(500, name="big", output=300))
    step(scheduler)
    step(scheduler)
    scheduler.add_request(make_request(900, name="stuck"))
    scheduler.add_request(make_request(40, name="short"))
    step(scheduler)
    assert step(scheduler).get("short")
    assert "stuck" not in {r.request_id for r in scheduler.running}
    drain(scheduler)


def test_longs_of_several_sizes_without_room_let_shorts_pass() -> None:
    # 66 blocks; the longs are fronts of two lanes, and both lack blocks.
    scheduler = loaded(options={}, num_blocks=66, budget=256)
    scheduler.add_request(make_request(800, name="big", output=200))
    until(scheduler, lambda: scheduler.requests["big"].num_output_tokens)
    for name, tokens in (("stuck", 300), ("larger", 900)):
        scheduler.add_request(make_request(tokens, name=name))
    step(scheduler)
    for number in range(5):
        name = f"s{number}"
        scheduler.add_request(make_request(20, name=name, output=1))
        until(scheduler, lambda name=name: name not in scheduler.requests, max_steps=6)
    assert "big" in scheduler.requests


def test_longs_without_room_have_no_part_of_the_chunk() -> None:
    options = {"max_long_partial_prefills": 4}
    scheduler = pinned(loaded(options=options, num_blocks=90, budget=256), 64)
    scheduler.add_request(make_request(8, name="decode", output=200))
    step(scheduler)
    scheduler.add_request(make_request(900, name="long"))
    step(scheduler)
    for number in range(3):
        scheduler.add_request(make_request(1500, name=f"stuck{number}"))
    got = [step(scheduler).get("long") for _ in range(6)]
    assert got[2:] == [64] * 4


def test_policy_that_is_off_is_left_out() -> None:
    scheduler = loaded(*[1200] * 4, options={"max_num_partial_prefills": 1}, max_num_seqs=2)
    assert scheduler._policies == []
    drain(scheduler)


def test_hundreds_of_evicted_longs_let_a_short_pass_soon() -> None:
    # 23 blocks: a long needs 14 of them, or 4 while its prefix is cached.
    prefix, own = [9] * 160, 60
    scheduler = loaded(
        options={"long_prefill_token_threshold": 100},
        num_blocks=24,
        budget=64,
        max_num_seqs=2,
        prefix_caching=True,
    )
    scheduler.add_request(make_request([*prefix, 1], output=1))
    drain(scheduler)
    scheduler.add_request(make_request(16, name="leaves", output=400))
    step(scheduler)
    scheduler.add_request(make_request(270, name="stays", output=100))
    step(scheduler)
    for number in range(600):
        scheduler.add_request(make_request([*prefix, *[100 + number] * own]))
    scheduler.add_request(make_request(20, name="short"))
    until(scheduler, lambda: scheduler.requests["stays"].num_output_tokens)
    assert longs_waiting(scheduler) == 0
    scheduler.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
    until(scheduler, lambda: "short" in {r.request_id for r in scheduler.running}, max_steps=8)
    assert longs_waiting(scheduler) == 600


def test_preemption_victim_is_the_long_prefill() -> None:
    scheduler = loaded(options={}, num_blocks=41, budget=200, scheduler_reserve_full_isl=False)
    scheduler.add_request(make_request(20, name="decode", output=400))
    step(scheduler)
    scheduler.add_request(make_request(600, name="long"))
    step(scheduler)
    for name in ("s1", "s2", "s3"):
        scheduler.add_request(make_request(60, name=name, output=60))
    preempted = set()
    for _ in range(30):
        before = {r.request_id for r in scheduler.running}
        step(scheduler)
        preempted |= before & {r.request_id for r in scheduler.waiting}
    assert preempted == {"long"}
    drain(scheduler)


def test_preempted_long_is_not_the_first_victim_again() -> None:
    long, short = make_request(1200), make_request(60)
    scheduler = loaded(budget=32)
    for request in (long, short):
        scheduler.add_request(request)
    step(scheduler)
    assert policy(scheduler).rank(long) > policy(scheduler).rank(short)
    long.num_preemptions = 1
    assert policy(scheduler).rank(long) == policy(scheduler).rank(short)


def test_preempted_answer_is_not_passed_by_shorts(clock: list[float]) -> None:
    def longest_gap(policies: dict[str, Any] | None) -> tuple[float, int]:
        """Run shorts beside three long answers in a small cache."""
        clock[0] = 1000.0
        scheduler = make_scheduler(
            policies, budget=256, max_num_seqs=32, num_blocks=90, prefix_caching=True
        )
        answers = [make_request(300, name=name, output=800) for name in "ABC"]
        for request in answers:
            scheduler.add_request(request)
        spoke = dict.fromkeys("ABC", clock[0])
        longest, shorts = 0.0, 0
        for number in range(10_000):
            if number > 4 and number % 6 == 0:
                scheduler.add_request(make_request(60, output=40))
                shorts += 1
            tokens = step(scheduler)
            clock[0] += 0.02
            for request in answers:
                if request.request_id in tokens and not request.is_prefill_chunk:
                    longest = max(longest, clock[0] - spoke[request.request_id])
                    spoke[request.request_id] = clock[0]
            if all(request.is_finished() for request in answers):
                return longest, shorts
        raise AssertionError("the answers never ended")

    upstream_gap, upstream_shorts = longest_gap(None)
    policy_gap, policy_shorts = longest_gap({"long_prompt": {}})
    # Within one more preemption, because upstream's victims may differ.
    assert policy_gap < 1.5 * upstream_gap
    assert policy_shorts < 1.5 * upstream_shorts


def test_priority_decides_within_each_lane() -> None:
    scheduler = loaded(options={}, priority=True)
    scheduler.add_request(make_request(900, name="running"))
    step(scheduler)
    for name, priority in (("late", 5), ("soon", 1), ("first", 0)):
        scheduler.add_request(make_request(500, name=f"long-{name}", priority=priority))
        scheduler.add_request(make_request(70, name=f"short-{name}", priority=priority))
    order = admissions(scheduler)
    longs = [name for name in order if name.startswith("long")]
    shorts = [name for name in order if name.startswith("short")]
    assert longs == ["long-first", "long-soon", "long-late"]
    assert shorts == ["short-first", "short-soon", "short-late"]
    assert order.index("short-late") < order.index("long-soon")


@pytest.mark.parametrize("shorts", [1, 3])
def test_short_has_its_part_with_many_decodes(shorts: int) -> None:
    scheduler = pinned(loaded(options={}, budget=64, max_num_seqs=64), 64)
    for _ in range(50):
        scheduler.add_request(make_request(4, output=500))
    until(scheduler, lambda: sum(not r.is_prefill_chunk for r in scheduler.running) == 50)
    scheduler.add_request(make_request(1500, name="long"))
    assert step(scheduler)["long"] == 14
    for number in range(shorts):
        scheduler.add_request(make_request(3, name=f"s{number}"))
    got = step(scheduler)
    # The decodes leave 14 tokens for the long prompt and the shorts.
    assert got["long"] == 14 - 3 * shorts
    assert got["s0"] == 3


# The size of a long prompt's chunk


def pinned(scheduler: Any, tokens: int) -> Any:
    """Set the chunk of long prompts."""
    policy(scheduler).size = PinnedChunk(tokens)
    return scheduler


def test_long_alone_gets_the_whole_budget() -> None:
    assert step(pinned(loaded(1200, options={}, budget=512), 100)) == {"0": 512}


def test_long_is_cut_for_a_while_after_the_last_short(clock: list[float]) -> None:
    scheduler = pinned(loaded(1900, options={}, budget=512), 100)
    scheduler.add_request(make_request(50, name="short", output=1))
    assert step(scheduler) == {"0": 50, "short": 50}
    clock[0] += 0.9
    assert step(scheduler) == {"0": 100}
    clock[0] += 0.2
    assert step(scheduler) == {"0": 512}


def test_long_with_decodes_gets_its_chunk() -> None:
    scheduler = pinned(loaded(8, options={}, budget=512), 100)
    step(scheduler)
    scheduler.add_request(make_request(1200, name="long"))
    assert step(scheduler) == {"0": 1, "long": 100}


@pytest.mark.parametrize(("short", "long"), [(30, 70), (50, 50), (90, 50), (400, 50), (600, 50)])
def test_long_yields_up_to_half_of_its_chunk_to_shorts(short: int, long: int) -> None:
    scheduler = pinned(loaded(8, options={"long_prefill_token_threshold": 700}, budget=512), 100)
    step(scheduler)
    scheduler.add_request(make_request(1200, name="long"))
    scheduler.add_request(make_request(short, name="short"))
    got = step(scheduler)
    assert got == {"0": 1, "long": long, "short": min(short, 511 - long)}


def test_shorts_leave_a_long_a_quarter_of_the_step() -> None:
    scheduler = pinned(loaded(8, options={}, budget=65), 64)
    step(scheduler)
    scheduler.add_request(make_request(1900, name="long"))
    step(scheduler)
    for number in range(20):
        scheduler.add_request(make_request(60, name=f"s{number}", output=1))
    for _ in range(10):
        got = step(scheduler)
        assert got["long"] >= 16
        assert sum(got.values()) == 65


def test_rest_of_a_long_is_cut_too() -> None:
    """Otherwise the last tokens below the threshold would be one slow step."""
    scheduler = loaded(8, options={"long_prefill_token_threshold": 300}, budget=512)
    pinned(scheduler, 100)
    step(scheduler)
    scheduler.add_request(make_request(350, name="long"))
    assert [step(scheduler)["long"] for _ in range(4)] == [100, 100, 100, 50]


def test_longs_divide_the_chunk() -> None:
    scheduler = pinned(loaded(8, options={"max_long_partial_prefills": 2}, budget=512), 100)
    step(scheduler)
    for name in ("a", "b"):
        scheduler.add_request(make_request(1200, name=name))
    step(scheduler)
    assert step(scheduler) == {"0": 1, "a": 50, "b": 50}


def test_steps_with_fewer_tokens_than_prefills_are_not_empty() -> None:
    options = {"max_long_partial_prefills": 8}
    scheduler = loaded(*[1200] * 8, options=options, budget=5, max_num_seqs=5)
    assert all(step(scheduler) for _ in range(20))


def test_long_does_not_yield_to_shorts_without_a_slot() -> None:
    scheduler = pinned(loaded(8, options={}, budget=512, max_num_seqs=2), 100)
    step(scheduler)
    scheduler.add_request(make_request(1900, name="long"))
    step(scheduler)
    scheduler.add_request(make_request(50, name="short"))
    assert [step(scheduler)["long"] for _ in range(3)] == [100] * 3


def test_chunk_is_sized_by_the_measured_steps(clock: list[float]) -> None:
    """A step takes 10 ms and 1 ms for each 10 tokens: chunks of 512 lose nothing notable."""
    scheduler = loaded(8, options={}, budget=2048, max_model_len=100_000, num_blocks=8000)
    step(scheduler)
    scheduler.add_request(make_request(90_000, name="long", output=1))
    sizes = []
    while "long" in scheduler.requests:
        output = scheduler.schedule()
        clock[0] += 0.01 + 1e-4 * output.num_scheduled_tokens.get("long", 0)
        scheduler.update_from_output(output, answer(scheduler, output))
        sizes.append(policy(scheduler).size.tokens)
        assert len(sizes) < 1000
    # Half of 2,048 tokens take 5 % longer in all, half of 1,024 take 9 %.
    assert sizes[-1] == 1024
    assert policy(scheduler).gauges()["long_chunk_tokens"] == 1024


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_fixed_share_limits_the_chunk(share: float) -> None:
    scheduler = loaded(8, options={"long_prefill_share": share}, budget=512)
    step(scheduler)
    scheduler.add_request(make_request(1200, name="long"))
    assert step(scheduler)["long"] == min(512 * share, 511)


def test_fixed_share_is_divided_among_longs() -> None:
    options = {"long_prefill_share": 0.25, "max_long_partial_prefills": 2}
    scheduler = loaded(1200, 1200, 8, options=options, budget=512)
    for _ in range(3):
        got = step(scheduler)
        assert (got["0"], got["1"]) == (64, 64)


@pytest.mark.parametrize(("share", "tokens"), [(0.25, 8), (0.01, 1)])
def test_fixed_share_includes_overdue_longs(clock: list[float], share: float, tokens: int) -> None:
    options = {"long_prefill_share": share, "max_wait_s": 5}
    scheduler = loaded(1900, 1900, 8, options=options, budget=64)
    assert set(step(scheduler)) == {"0", "2"}
    clock[0] += 6
    got = step(scheduler)
    assert (got["0"], got["1"]) == (tokens, tokens)


# Scheduler classes


@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_scheduler_without_policies_uses_upstreams_queue(kind: type) -> None:
    scheduler = make_scheduler(scheduler_cls=kind)
    assert not isinstance(scheduler.waiting, LaneQueue)
    assert scheduler._policies == []


@pytest.mark.parametrize("kind", [LongPromptScheduler, SyncLongPromptScheduler])
def test_long_prompt_schedulers_enable_the_policy(kind: type) -> None:
    assert policy(make_scheduler(scheduler_cls=kind)).name == "long_prompt"


def test_long_prompt_scheduler_accepts_settings() -> None:
    scheduler = make_scheduler(
        {"long_prompt": {"max_long_partial_prefills": 8}}, scheduler_cls=LongPromptScheduler
    )
    assert policy(scheduler).settings.max_long_partial_prefills == 8


def test_policies_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vllm.vllm_sched"):
        make_scheduler({"long_prompt": {}})
    line, *_ = [r.message for r in caplog.records if r.name == "vllm.vllm_sched"]
    assert ": PolicyScheduler, policies: " in line
    assert "long_prompt(long_prefill_token_threshold=80, max_long_partial_prefills=1, " in line


def test_former_setting_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        make_scheduler({"long_prompt": {"long_step_stretch": 6}})
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "long_prompt.long_step_stretch" in record.getMessage()
    assert "see itl_ms" in record.getMessage()
