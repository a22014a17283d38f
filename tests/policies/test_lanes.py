"""Lanes: urgent before normal before batch, reserves, and bounded waits."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import make_request
from tests.policies.making import Bench
from vllm_sched import PolicyScheduler, SyncPolicyScheduler


def laned(**settings: object) -> dict[str, dict[str, object]]:
    return {"lanes": settings}


def order_of_entry(bench: Bench, max_steps: int = 200) -> list[str]:
    """Run until no request waits; return the names in order of entry."""
    entered: list[str] = []
    for _ in range(max_steps):
        if not len(bench.scheduler.waiting):
            break
        before = bench.running
        bench.step()
        entered += [r.request_id for r in bench.scheduler.running if r.request_id not in before]
    return entered


def test_urgent_enters_before_normal_before_batch() -> None:
    bench = Bench(laned(), max_num_seqs=1)
    bench.add("first", 10, output=2)
    bench.step()
    for name, lane in (("b", "batch"), ("n", None), ("u", "urgent"), ("m", "normal")):
        bench.add(name, 10, output=2, lane=lane)
    assert order_of_entry(bench) == ["u", "n", "m", "b"]


def test_priority_sets_the_lane_if_no_lane_is_given() -> None:
    bench = Bench(laned(), max_num_seqs=1)
    bench.add("first", 10, output=2)
    bench.step()
    bench.add("b", 10, output=2, priority=5)
    bench.add("n", 10, output=2)
    bench.add("u", 10, output=2, priority=-1)
    bench.add("named", 10, output=2, priority=-1, lane="batch")
    assert order_of_entry(bench) == ["u", "n", "b", "named"]


@pytest.mark.parametrize("lane", ["nosuch", 3, ["urgent"], None])
def test_unknown_lane_is_counted_and_served_as_normal(lane: object) -> None:
    bench = Bench(laned())
    request = bench.add("r", 10)
    bench["lanes"].arrived(request, {"lane": lane})
    assert bench["lanes"].lane(request, int) == "normal"
    assert bench["lanes"].counters()["unknown_lanes"] == (lane is not None)


def test_batch_leaves_reserved_slots_free() -> None:
    bench = Bench(laned(reserve_slots=0.25), max_num_seqs=8)
    for number in range(20):
        bench.add(f"b{number}", 10, lane="batch", output=50)
    bench.steps(5)
    assert len(bench.running) == 6
    assert bench["lanes"].held_reason("batch") == "reserve"
    bench.add("u", 10, lane="urgent")
    bench.add("n", 10)
    bench.step()
    assert bench.running >= {"u", "n"}


def test_batch_leaves_reserved_kv_free() -> None:
    bench = Bench(laned(reserve_kv=0.5, reserve_slots=0), num_blocks=101)
    for number in range(10):
        bench.add(f"b{number}", 16 * 10, lane="batch", output=50)
    bench.steps(20)
    # Ten blocks each at first; half of the cache is reserved.
    assert len(bench.running) == 4


@pytest.mark.parametrize("beside", [{}, {"long_prompt": {}}, {"rotation": {}}], ids="+".join)
@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
def test_batch_answers_that_grew_into_the_reserve_are_preempted(
    kind: type, beside: dict[str, dict[str, object]]
) -> None:
    bench = Bench(
        laned() | beside, scheduler_cls=kind, async_scheduling=kind is PolicyScheduler,
        num_blocks=129, budget=128,
    )  # fmt: skip
    requests = [bench.add(f"b{number}", 100, lane="batch", output=800) for number in range(20)]
    urgent = []
    for number in range(600):
        if number % 40 == 30:
            urgent.append(bench.add(f"u{number}", 120, lane="urgent", output=60))
        before = {r.request_id: r.num_output_tokens for r in bench.scheduler.running}
        tokens = bench.step()
        # A decode behind a prompt gets its token in each step.
        left_out = before.keys() & bench.running - tokens.keys()
        assert not any(before[name] for name in left_out)
    assert sum(request.num_preemptions for request in requests) > 3
    assert not any(request.num_preemptions for request in urgent)
    assert sum(request.is_finished() for request in urgent) >= 13


def test_newest_request_of_the_lowest_lane_is_preempted_first() -> None:
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=65, budget=512)
    for name, lane in (("b1", "batch"), ("n1", "normal"), ("b2", "batch"), ("u", "urgent")):
        bench.add(name, 200, lane=lane, output=600)
        bench.step()
    bench.add("n2", 200, lane="normal", output=600)
    gone: list[str] = []
    while len(gone) < 4:
        before = bench.running
        bench.step()
        gone += before - bench.running
    assert gone == ["b2", "b1", "n2", "n1"]


def test_service_classes_of_decodes_are_cached() -> None:
    """A full cache needs the classes in each step, and hundreds of calls are slow."""
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=59, budget=512)
    lanes = ["batch", "normal", "urgent"] * 5
    for number, lane in enumerate(lanes):
        bench.add(f"{lane}{number}", 20, lane=lane, output=600)
    bench.steps(4)
    scheduler, calls = bench.scheduler, []
    assert len(bench.running) == len(lanes)
    # Fewer blocks are free than a step may need, and enough for these steps.
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert 2 * len(lanes) - 1 > free >= len(lanes)
    classes = scheduler._planner.classes
    ask = classes.of
    classes.of = lambda request: calls.append(request) or ask(request)
    classes._known.clear()
    bench.steps(10)
    assert len(calls) == len(lanes)
    # Decodes keep their order, and finished requests leave the cache.
    order = [r.request_id.rstrip("0123456789") for r in scheduler.running]
    assert order == ["urgent"] * 5 + ["normal"] * 5 + ["batch"] * 5
    for request in list(scheduler.running):
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert not classes._known


def test_decodes_are_not_sorted_if_their_blocks_are_free() -> None:
    bench = Bench(laned(), num_blocks=64)
    bench.add("d", 10)
    bench.step()
    order = bench.scheduler._planner._order
    assert [order._may_preempt(blocks / 64, []) for blocks in (1, 2)] == [True, False]


def test_changed_service_class_takes_effect_at_once() -> None:
    """A released request has the first class; after a preemption another may get it."""
    bench = Bench(laned(reserve_kv=0, reserve_slots=0, batch_max_wait_s=5.0), num_blocks=200)
    lanes, classes = bench["lanes"], bench.scheduler._planner.classes
    requests = [bench.add(name, 10, lane="batch", output=600) for name in ("one", "two")]
    bench.steps(2)
    before = lanes.reclassed
    assert [lanes.service_class(request) for request in requests] == [2, 2]
    lanes._overdue.released["batch"] = "one"
    assert classes.of_decodes(requests) == dict(zip(requests, (0, 2), strict=True))
    # Another request is released while the first is preempted.
    lanes._running.discard("one")
    lanes._overdue._due["two"] = True
    lanes.admitted(requests[1])
    assert lanes.reclassed > before
    assert classes.of_decodes(requests) == dict(zip(requests, (2, 0), strict=True))
    lanes.departed(requests[1], bench.now)
    assert classes.of_decodes(requests[:1]) == {requests[0]: 2}


def test_long_running_answer_keeps_the_class_of_its_lane() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_kv=0), num_blocks=41, budget=512)
    bench.add("b", 300, lane="batch", output=900)
    bench.step()
    bench.now += 60
    bench.add("u", 200, lane="urgent", output=900)
    bench.until(lambda: bench.running == {"b", "u"})
    bench.until(lambda: bench.running != {"b", "u"})
    assert bench.running == {"u"}


def test_batch_enters_only_if_no_other_request_waits() -> None:
    bench = Bench(laned(reserve_slots=0), budget=64)
    bench.add("n1", 200)
    bench.add("n2", 200)
    bench.add("b", 10, lane="batch")
    for _ in range(3):
        bench.step()
        assert "b" not in bench.running
    assert bench["lanes"].held_reason("batch") == "others_wait"
    bench.drain()


def test_batch_is_held_while_another_prompt_is_computed() -> None:
    bench = Bench(laned(reserve_slots=0))
    bench.add("n", 300)
    bench.step()
    bench.add("b", 10, lane="batch")
    bench.steps(2)
    assert "b" not in bench.running
    assert bench["lanes"].held_reason("batch") == "others_prefill"
    bench.steps(3)
    assert "b" in bench.running


def test_batch_is_held_in_the_step_that_admits_another_prompt() -> None:
    bench = Bench(laned(reserve_slots=0))
    bench.add("n", 40)
    bench.add("b", 10, lane="batch")
    assert bench.step() == {"n": 40}
    assert "b" in bench.step()


def test_idle_session_does_not_hold_batch() -> None:
    """The session keeps its blocks until its client continues, possibly never."""
    bench = Bench(laned(reserve_kv=0.5), num_blocks=60)
    session = make_request(600, output=2)
    session.resumable = True
    bench.scheduler.add_request(session)
    bench.steps(12)
    assert not bench.running
    assert bench.scheduler.kv_cache_manager.usage > 0.5
    bench.add("b", 10, lane="batch")
    assert bench.step() == {"b": 10}


def test_batch_does_not_pass_an_urgent_request_without_room() -> None:
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=41, budget=256)
    bench.add("n", 300, output=100)
    bench.steps(2)
    bench.add("u", 500, lane="urgent")
    bench.add("b", 16, lane="batch")
    bench.steps(10)
    assert bench.running == {"n"}
    bench.drain()


def test_prompts_are_computed_in_lane_order() -> None:
    bench = Bench(laned(), long_prefill_token_threshold=10)
    bench.add("n", 200)
    bench.step()
    bench.add("u", 200, lane="urgent")
    assert bench.step() == {"n": 10, "u": 10}
    bench.scheduler.scheduler_config.long_prefill_token_threshold = 0
    assert bench.step() == {"u": 64}


@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
def test_urgent_prompt_begins_in_the_next_step(kind: type) -> None:
    asynchronous = kind is PolicyScheduler
    bench = Bench(laned(), scheduler_cls=kind, async_scheduling=asynchronous)
    bench.add("n", 1900)
    bench.steps(2)
    bench.add("u", 300, lane="urgent", output=1)
    first, *after = bench.steps(6)
    assert first == {"n": 32, "u": 32}
    assert after == [{"u": 64}] * 4 + [{"u": 12, "n": 52}]


def test_urgent_prompt_takes_only_the_tokens_that_it_needs() -> None:
    bench = Bench(laned())
    bench.add("n", 1900)
    bench.add("m", 1900)
    bench.steps(2)
    for name, tokens in (("u", 10), ("v", 50)):
        bench.add(name, tokens, lane="urgent", output=1)
    assert bench.step() == {"n": 54, "u": 10}
    assert bench.step() == {"n": 32, "v": 32}
    assert bench.step() == {"v": 18, "n": 46}


def test_no_tokens_are_kept_for_an_urgent_prompt_without_room() -> None:
    bench = Bench(laned(), num_blocks=125, scheduler_reserve_full_isl=True)
    bench.add("n", 1900)
    bench.steps(18)
    bench.add("u", 900, lane="urgent")  # there is no room for it
    bench.step()
    assert bench.steps(8) == [{"n": 64}] * 8


def test_no_tokens_are_kept_for_urgent_prompts_by_an_overdue_prefill() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0))
    bench.add("n", 1900)
    for number in range(10):
        bench.add(f"u{number}", 10, lane="urgent", output=1)
        assert bench.step()["n"] == 54
    bench.now += 1
    for number in range(10):
        bench.add(f"v{number}", 10, lane="urgent", output=1)
        assert bench.step() == {"n": 64}


def test_no_tokens_are_kept_for_an_overdue_prompt_without_room() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0), num_blocks=125, scheduler_reserve_full_isl=True)
    bench.add("u", 1900, lane="urgent")
    bench.steps(18)
    bench.add("late", 900)  # there is no room for it
    bench.now += 1
    bench.step()
    assert bench.steps(8) == [{"u": 64}] * 8


def test_batch_prompts_get_batch_share_while_other_lanes_are_active() -> None:
    bench = Bench(laned(batch_share=0.25, reserve_slots=0))
    bench.add("b1", 640, lane="batch")
    bench.add("b2", 640, lane="batch")
    assert bench.step() == {"b1": 64}
    bench.add("n", 100)
    # Another lane's prompt has the whole step; beside its decodes batch has its share.
    assert bench.step() == {"n": 64}
    assert bench.step() == {"n": 36}
    assert bench.step() == {"n": 1, "b1": 16}


def test_other_lanes_count_as_active_for_recent_s_after_they_left() -> None:
    bench = Bench(laned(batch_share=0.25, recent_s=5.0))
    bench.add("n", 10, output=1)
    bench.step()
    bench.add("b", 640, lane="batch")
    assert bench.step() == {"b": 16}
    bench.now += 4
    assert bench.step() == {"b": 16}
    bench.now += 2
    assert bench.step() == {"b": 64}


def test_overdue_prompt_is_computed_beside_others() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_slots=0), long_prefill_token_threshold=32)
    bench.add("u", 1900, lane="urgent")
    bench.step()
    bench.add("b", 300, lane="batch")
    bench.step()
    bench.now += 6
    bench.steps(3)
    assert "b" in bench.running
    assert bench["lanes"].counters()["starvation_releases"] == 1
    assert sum(step.get("b", 0) for step in bench.steps(8)) > 100


LESSER = [(None, "normal_max_wait_s"), ("batch", "batch_max_wait_s")]


@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
@pytest.mark.parametrize(("lane", "key"), LESSER)
def test_overdue_prompt_begins_in_the_next_step(lane: str | None, key: str, kind: type) -> None:
    bench = Bench(laned(**{key: 5.0}), scheduler_cls=kind, async_scheduling=kind is PolicyScheduler)
    bench.add("u", 1900, lane="urgent")
    bench.step()
    bench.add("late", 300, lane=lane, output=1)
    assert bench.steps(2) == [{"u": 64}] * 2
    bench.now += 5
    # The urgent prompt continues beside it.
    assert bench.steps(10) == [{"u": 32, "late": 32}] * 9 + [{"late": 12, "u": 52}]


def test_overdue_prompts_share_a_half_beside_an_urgent_prompt() -> None:
    bench = Bench(laned(normal_max_wait_s=5.0, batch_max_wait_s=5.0))
    bench.add("u", 1900, lane="urgent")
    bench.step()
    bench.add("n", 300, output=1)
    bench.add("b", 300, lane="batch")
    bench.now += 5
    assert bench.steps(2) == [{"u": 32, "n": 32}, {"n": 32, "b": 32}]
    # The older is first.
    assert bench.steps(7) == [{"n": 32, "u": 32}] * 7
    assert bench.steps(2) == [{"n": 12, "b": 20, "u": 32}, {"b": 32, "u": 32}]


@pytest.mark.parametrize(("lane", "key"), LESSER)
def test_urgent_prompt_gets_half_of_the_step_beside_an_overdue_prompt(
    lane: str | None, key: str
) -> None:
    bench = Bench(laned(**{key: 5.0}))
    bench.add("u", 100, lane="urgent", output=1)
    bench.step()
    bench.add("late", 900, lane=lane)
    bench.now += 5
    assert bench.steps(3) == [{"u": 32, "late": 32}, {"late": 60, "u": 4}, {"late": 64}]
    bench.add("v", 900, lane="urgent")
    assert bench.steps(2) == [{"late": 32, "v": 32}] * 2


def test_urgent_prompt_gets_half_beside_an_overdue_and_a_normal_prompt() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, normal_max_wait_s=60.0))
    bench.add("n", 1900)
    bench.step()
    bench.add("b", 900, lane="batch")
    bench.now += 5
    assert bench.steps(2) == [{"n": 32, "b": 32}] * 2
    bench.add("u", 40, lane="urgent", output=1)
    assert bench.steps(2) == [{"b": 32, "u": 32}, {"b": 32, "u": 8, "n": 24}]


def test_successive_overdue_prompts_leave_an_urgent_prompt_half_of_each_step() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0))
    bench.add("u", 1900, lane="urgent")
    bench.step()
    for number in range(4):
        bench.add(f"b{number}", 200, lane="batch", output=1)
    bench.now += 5
    steps = bench.steps(20)
    assert all(step["u"] >= 32 for step in steps)
    assert bench["lanes"].counters()["starvation_releases"] == 3
    assert sum(tokens for step in steps for name, tokens in step.items() if name != "u") > 500


def test_batch_continues_until_an_urgent_request_has_room() -> None:
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=41, budget=64)
    bench.add("b", 400, lane="batch", output=30)
    bench.step()
    bench.add("u", 600, lane="urgent")
    for _ in range(100):
        bench.step()
        if "b" not in bench.running:
            break
    bench.step()
    assert bench.running == {"u"}
    bench.drain()


def test_batch_alone_has_the_whole_step() -> None:
    bench = Bench(laned(batch_share=0.25))
    bench.add("b", 640, lane="batch")
    assert bench.steps(2) == [{"b": 64}, {"b": 64}]


@pytest.mark.parametrize(
    ("lane", "key"), [(None, "normal_max_wait_s"), ("batch", "batch_max_wait_s")]
)
def test_head_of_a_lane_waits_at_most_its_bound(lane: str | None, key: str) -> None:
    bench = Bench(laned(**{key: 5.0}), max_num_seqs=4)
    for number in range(4):
        bench.add(f"u{number}", 10, lane="urgent", output=20)
    bench.step()
    bench.add("held", 10, lane=lane)
    for number in range(4, 300):
        bench.add(f"u{number}", 10, lane="urgent", output=20)
        bench.step(0.1)
        if "held" in bench.running:
            break
    # The bound, and the time until the next free slot.
    assert 5.0 <= bench.now - 1000 <= 5.0 + 2.2
    assert bench["lanes"].counters()["starvation_releases"] == 1


@pytest.mark.parametrize(
    "beside",
    [{}, {"long_prompt": {}}, {"rotation": {}}, {"long_prompt": {}, "rotation": {}}],
    ids="+".join,
)
def test_overdue_requests_of_a_lane_are_released_one_at_a_time(
    beside: dict[str, dict[str, object]],
) -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_slots=0) | beside, max_num_seqs=4)
    for number in range(4):
        bench.add(f"u{number}", 10, lane="urgent", output=10)
    bench.step()
    # With a second policy a lane has several heads, of different lengths.
    for number in range(12):
        bench.add(f"b{number}", 900 if number % 4 == 1 else 10, lane="batch", output=10)
    bench.now += 6
    number, entered = 4, 0
    for _ in range(100):
        while len(bench.scheduler.waiting) < 20:
            bench.add(f"u{number}", 10, lane="urgent", output=10)
            number += 1
        before = bench.running
        bench.step()
        entered += sum(name.startswith("b") for name in bench.running - before)
        assert sum(name.startswith("b") for name in bench.running) <= 1
    assert entered >= 4
    assert bench["lanes"].counters()["starvation_releases"] == entered


def test_overdue_prefill_is_computed_before_urgent_prompts() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0), budget=64, max_num_seqs=16)
    bench.add("n", 1900)
    bench.step()
    for number in range(5):
        bench.add(f"u{number}", 1900, lane="urgent")
    assert bench.steps(10)[1:] == [{"u0": 64}] * 9
    bench.now += 2
    bench.step()  # this step finds that it is overdue
    assert bench.steps(3) == [{"n": 64}] * 3


def test_preempted_released_request_does_not_wait_again() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0), max_num_seqs=2)
    for number in range(2):
        bench.add(f"u{number}", 10, lane="urgent", output=3)
    bench.step()
    victim = bench.add("b", 10, lane="batch", output=50)
    bench.now += 6
    for number in range(2, 40):
        bench.add(f"u{number}", 10, lane="urgent", output=3)
    bench.until(lambda: "b" in bench.running)
    bench.scheduler.running.remove(victim)
    bench.scheduler._preempt_request(victim, 0.0)
    bench.step()
    assert "b" in bench.running


@pytest.mark.parametrize("priorities", [False, True])
def test_released_request_behind_others_blocks_no_request(priorities: bool) -> None:
    policies = laned(batch_max_wait_s=5.0, reserve_slots=0)
    bench = Bench(policies, max_num_seqs=3, priority=priorities)
    earlier = bench.add("earlier", 10, lane="batch", output=200)
    bench.step()
    urgent = iter(range(10_000))

    def under_load(seconds: float) -> None:
        while len(bench.scheduler.waiting) < 8:
            bench.add(f"u{next(urgent)}", 10, lane="urgent", output=3)
        bench.step(seconds)

    under_load(0.01)
    released = bench.add("released", 10, lane="batch", output=200, priority=9)
    bench.now += 6
    for _ in range(100):
        if "released" in bench.running:
            break
        under_load(0.01)
    for victim in (released, earlier):
        bench.scheduler.running.remove(victim)
        bench.scheduler._preempt_request(victim, 0.0)
    bench.add("better", 10, lane="batch", output=3, priority=1)
    since = bench.now
    while bench.now < since + 8 and not {"earlier", "released"} <= bench.running:
        under_load(0.05)
    assert {"earlier", "released"} <= bench.running


def test_gauges_count_running_and_waiting_by_lane() -> None:
    bench = Bench(laned(), max_num_seqs=2)
    for name, lane in (("u", "urgent"), ("n", None), ("n2", None), ("b", "batch")):
        bench.add(name, 10, lane=lane)
    bench.step()
    bench.step()
    shown = bench["lanes"].gauges()
    assert {name: value for name, value in shown.items() if value} == {
        "running_urgent": 1,
        "running_normal": 1,
        "waiting_normal": 1,
        "waiting_batch": 1,
    }


def test_finished_requests_leave_no_state() -> None:
    bench = Bench(laned(), max_num_seqs=2)
    for number in range(6):
        bench.add(str(number), 10, lane="batch" if number % 2 else "urgent")
    bench.steps(2)
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.step()
    bench.scheduler.finish_requests("5", RequestStatus.FINISHED_ABORTED)
    bench.drain()
    lanes = bench["lanes"]
    assert lanes._asked == lanes._running.requests == lanes._overdue.released == {}
    assert set(lanes._running.counts.values()) == {0}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_overdue_requests_in_every_slot_let_an_urgent_request_enter(slots: int) -> None:
    bench = Bench(
        laned(batch_max_wait_s=5.0, normal_max_wait_s=5.0, urgent_max_wait_s=2.0, reserve_slots=0),
        max_num_seqs=slots,
    )
    count = 0

    def flood() -> None:
        nonlocal count
        while len(bench.scheduler.waiting) < 40:
            count += 1
            bench.add(f"x{count}", 10, lane="batch" if count % 2 else None, output=20)
        bench.step(0.05)

    for _ in range(200):
        flood()
    bench.add("u", 10, lane="urgent")
    since = bench.now
    while "u" not in bench.running:
        flood()
        assert bench.now - since < 4.0


@pytest.mark.parametrize("load", [1.04, 1.25])
def test_urgent_overload_does_not_starve_other_lanes(load: float) -> None:
    bench = Bench(
        laned(urgent_max_wait_s=2.0, normal_max_wait_s=5.0, batch_max_wait_s=15.0), max_num_seqs=4
    )
    served, count = 2.0, 0  # seconds that a request runs
    entered: dict[str, float] = {}

    def flood(until: float) -> None:
        nonlocal count
        while bench.now < until:
            while count * served / 4 / load <= bench.now - 1000:
                bench.add(f"u{count}", 10, lane="urgent", output=20)
                count += 1
            before = bench.running
            bench.step(0.1)
            entered.update(dict.fromkeys(bench.running - before, bench.now))

    # From then on the urgent head is always overdue.
    flood(1000 + 1.5 * served * load / (load - 1))
    since = bench.now
    bench.add("n", 10, output=20)
    bench.add("b", 10, lane="batch", output=20)
    flood(since + 25)
    assert 5.0 <= entered["n"] - since <= 5.0 + served
    assert 15.0 <= entered["b"] - since <= 15.0 + served
    assert any(name.startswith("u") and at > entered["b"] for name, at in entered.items())


def test_batch_prompt_continues_beside_a_blocked_prompt() -> None:
    bench = Bench(laned(batch_share=0.5, reserve_slots=0))
    bench.add("b", 1500, lane="batch")
    bench.steps(2)
    bench.turn_away("lora")
    bench.add("lora", 100)
    assert sum(step.get("b", 0) for step in bench.steps(18)) >= 15 * 32


def dated(bench: Bench, name: str, tokens: int = 10, *, left_ms: object, **more: object) -> None:
    request = make_request(tokens, name=name, output=2, **more)
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {"deadline_ms": left_ms}
    bench.scheduler.add_request(request)


def full_bench(**settings: object) -> Bench:
    """Return a bench whose only slot is taken."""
    bench = Bench({**laned(**settings), "long_prompt": {}}, max_num_seqs=1)
    bench.add("first", 10, output=40)
    bench.step()
    return bench


def test_earliest_deadline_of_a_lane_enters_first() -> None:
    bench = full_bench()
    bench.add("none", 10, output=2)
    for name, left_ms in (("loose", 20_000), ("tight", 1_000), ("beyond", 50_000)):
        dated(bench, name, left_ms=left_ms)
    dated(bench, "long", 1_000, left_ms=5_000)
    bench.add("urgent", 10, output=2, lane="urgent")
    order = ["urgent", "tight", "long", "loose", "none", "beyond"]
    assert order_of_entry(bench) == order, "a deadline beyond the longest wait is none"


@pytest.mark.parametrize("left_ms", ["1000", True, None, float("nan"), [1], {}])
def test_deadline_that_is_no_number_is_ignored(left_ms: object) -> None:
    bench = full_bench()
    bench.add("none", 10, output=2)
    dated(bench, "odd", left_ms=left_ms)
    assert order_of_entry(bench) == ["none", "odd"]


def test_late_request_lets_those_pass_that_can_be_on_time() -> None:
    bench = full_bench()
    for name, left_ms in (("over", -5), ("late", 50), ("late too", 60)):
        dated(bench, name, left_ms=left_ms)
    bench.now += 0.1
    dated(bench, "on time", left_ms=3_000)
    assert order_of_entry(bench) == ["on time", "over", "late", "late too"]


def test_request_without_a_deadline_waits_no_longer_than_its_bound() -> None:
    bench = full_bench(normal_max_wait_s=5.0)
    bench.add("none", 10, output=2)
    bench.now += 4.5
    dated(bench, "tight", left_ms=400)
    dated(bench, "loose", left_ms=600)
    assert order_of_entry(bench) == ["tight", "none", "loose"]


def test_deadlines_of_departed_requests_are_forgotten() -> None:
    bench = full_bench()
    dated(bench, "gone", left_ms=1_000)
    assert bench["lanes"]._left_s
    bench.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    assert not bench["lanes"]._left_s
