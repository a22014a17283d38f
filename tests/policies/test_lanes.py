"""Lanes: urgent before normal before batch, room kept, and no wait without a bound."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import make_request
from tests.policies.making import Bench
from vllm_sched import PolicyScheduler, SyncPolicyScheduler


def laned(**settings: object) -> dict[str, dict[str, object]]:
    return {"lanes": settings}


def order_of_entry(bench: Bench, most: int = 200) -> list[str]:
    """Run until nobody waits, and name everybody as they entered."""
    entered: list[str] = []
    for _ in range(most):
        if not len(bench.scheduler.waiting):
            break
        before = bench.running
        bench.step()
        entered += [r.request_id for r in bench.scheduler.running if r.request_id not in before]
    return entered


def test_urgent_before_normal_before_batch() -> None:
    bench = Bench(laned(), max_num_seqs=1)
    bench.add("first", 10, output=2)
    bench.step()
    for name, lane in (("b", "batch"), ("n", None), ("u", "urgent"), ("m", "normal")):
        bench.add(name, 10, output=2, lane=lane)
    assert order_of_entry(bench) == ["u", "n", "m", "b"]


def test_a_priority_names_the_lane_where_nothing_else_does() -> None:
    bench = Bench(laned(), max_num_seqs=1)
    bench.add("first", 10, output=2)
    bench.step()
    bench.add("b", 10, output=2, priority=5)
    bench.add("n", 10, output=2)
    bench.add("u", 10, output=2, priority=-1)
    bench.add("asked", 10, output=2, priority=-1, lane="batch")
    assert order_of_entry(bench) == ["u", "n", "b", "asked"]


@pytest.mark.parametrize("asked", ["nosuch", 3, ["urgent"], None])
def test_a_lane_that_there_is_not_is_counted_and_served_as_normal(asked: object) -> None:
    bench = Bench(laned())
    request = bench.add("r", 10)
    bench["lanes"].arrived(request, {"lane": asked})
    assert bench["lanes"].lane(request, int) == "normal"
    assert bench["lanes"].counters()["unknown_lanes"] == (asked is not None)


def test_batch_leaves_slots_free() -> None:
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


def test_batch_leaves_kv_free() -> None:
    bench = Bench(laned(reserve_kv=0.5, reserve_slots=0), num_blocks=101)
    for number in range(10):
        bench.add(f"b{number}", 16 * 10, lane="batch", output=50)
    bench.steps(20)
    # Ten blocks each at first; the reserve of fifty is not for them to grow into and to enter.
    assert len(bench.running) == 4


@pytest.mark.parametrize("beside", [{}, {"long_prompt": {}}, {"rotation": {}}], ids="+".join)
@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
def test_batch_gives_way_where_its_answers_grew_into_what_it_left(
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
        # Whoever stands behind a prompt has his token in each step.
        left_out = before.keys() & bench.running - tokens.keys()
        assert not any(before[name] for name in left_out)
    assert sum(request.num_preemptions for request in requests) > 3
    assert not any(request.num_preemptions for request in urgent)
    assert sum(request.is_finished() for request in urgent) >= 13


def test_the_newest_of_the_worst_class_is_preempted_first() -> None:
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


def test_classes_of_those_who_decode_are_not_asked_in_every_step() -> None:
    """While the cache is full they are needed in each; to ask hundreds is a good part of one."""
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=59, budget=512)
    lanes = ["batch", "normal", "urgent"] * 5
    for number, lane in enumerate(lanes):
        bench.add(f"{lane}{number}", 20, lane=lane, output=600)
    bench.steps(4)
    scheduler, asked = bench.scheduler, []
    assert len(bench.running) == len(lanes)
    # Fewer blocks than may be needed in a step, and as many as are in all of them.
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert 2 * len(lanes) - 1 > free >= len(lanes)
    classes = scheduler._planner.classes
    ask = classes.of
    classes.of = lambda request: asked.append(request) or ask(request)
    classes._known.clear()
    bench.steps(10)
    assert len(asked) == len(lanes)
    # But they are in their order, and those who are gone are forgotten.
    order = [r.request_id.rstrip("0123456789") for r in scheduler.running]
    assert order == ["urgent"] * 5 + ["normal"] * 5 + ["batch"] * 5
    for request in list(scheduler.running):
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert not classes._known


def test_of_another_class_it_has_another_place_at_once() -> None:
    """A released answer is of the first class; preempted, it can lose that to the next one."""
    bench = Bench(laned(reserve_kv=0, reserve_slots=0, batch_max_wait_s=5.0), num_blocks=200)
    lanes, classes = bench["lanes"], bench.scheduler._planner.classes
    requests = [bench.add(name, 10, lane="batch", output=600) for name in ("one", "two")]
    bench.steps(2)
    before = lanes.reclassed
    assert [lanes.service_class(request) for request in requests] == [2, 2]
    lanes._overdue.released["batch"] = "one"
    assert classes.of_decodes(requests) == dict(zip(requests, (0, 2), strict=True))
    # Another is let in for its wait while that one is away, as after a preemption.
    lanes._running.discard("one")
    lanes._overdue._due["two"] = True
    lanes.admitted(requests[1])
    assert lanes.reclassed > before
    assert classes.of_decodes(requests) == dict(zip(requests, (2, 0), strict=True))
    lanes.departed(requests[1], bench.now)
    assert classes.of_decodes(requests[:1]) == {requests[0]: 2}


def test_an_answer_that_is_long_in_writing_is_no_better_than_its_lane() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_kv=0), num_blocks=41, budget=512)
    bench.add("b", 300, lane="batch", output=900)
    bench.step()
    bench.now += 60
    bench.add("u", 200, lane="urgent", output=900)
    bench.until(lambda: bench.running == {"b", "u"})
    bench.until(lambda: bench.running != {"b", "u"})
    assert bench.running == {"u"}


def test_batch_enters_only_while_nobody_else_waits() -> None:
    bench = Bench(laned(reserve_slots=0), budget=64)
    bench.add("n1", 200)
    bench.add("n2", 200)
    bench.add("b", 10, lane="batch")
    for _ in range(3):
        bench.step()
        assert "b" not in bench.running
    assert bench["lanes"].held_reason("batch") == "others_wait"
    bench.drain()


def test_batch_is_held_while_a_prompt_of_others_is_computed() -> None:
    """It would be given nothing; other policies are to know that it doesn't come."""
    bench = Bench(laned(reserve_slots=0))
    bench.add("n", 300)
    bench.step()
    bench.add("b", 10, lane="batch")
    bench.steps(2)
    assert "b" not in bench.running
    assert bench["lanes"].held_reason("batch") == "others_prefill"
    bench.steps(3)
    assert "b" in bench.running


def test_so_it_is_in_the_step_in_which_that_one_comes() -> None:
    bench = Bench(laned(reserve_slots=0))
    bench.add("n", 40)
    bench.add("b", 10, lane="batch")
    assert bench.step() == {"n": 40}
    assert "b" in bench.step()


def test_a_session_asleep_does_not_hold_batch_beside_an_idle_engine() -> None:
    """It keeps its blocks until its client says more, which may be never."""
    bench = Bench(laned(reserve_kv=0.5), num_blocks=60)
    session = make_request(600, output=2)
    session.resumable = True
    bench.scheduler.add_request(session)
    bench.steps(12)
    assert not bench.running
    assert bench.scheduler.kv_cache_manager.usage > 0.5
    bench.add("b", 10, lane="batch")
    assert bench.step() == {"b": 10}


def test_batch_does_not_pass_an_urgent_one_that_finds_no_room() -> None:
    bench = Bench(laned(reserve_kv=0, reserve_slots=0), num_blocks=41, budget=256)
    bench.add("n", 300, output=100)
    bench.steps(2)
    bench.add("u", 500, lane="urgent")
    bench.add("b", 16, lane="batch")
    bench.steps(10)
    assert bench.running == {"n"}
    bench.drain()


def test_prompts_are_computed_in_the_lanes_order() -> None:
    bench = Bench(laned(), long_prefill_token_threshold=10)
    bench.add("n", 200)
    bench.step()
    bench.add("u", 200, lane="urgent")
    assert bench.step() == {"n": 10, "u": 10}
    bench.scheduler.scheduler_config.long_prefill_token_threshold = 0
    assert bench.step() == {"u": 64}


@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
def test_an_urgent_prompt_begins_in_the_next_step_whatever_is_computed(kind: type) -> None:
    asynchronous = kind is PolicyScheduler
    bench = Bench(laned(), scheduler_cls=kind, async_scheduling=asynchronous)
    bench.add("n", 1900)
    bench.steps(2)
    bench.add("u", 300, lane="urgent", output=1)
    first, *after = bench.steps(6)
    assert first == {"n": 32, "u": 32}
    assert after == [{"u": 64}] * 4 + [{"u": 12, "n": 52}]


def test_it_is_left_what_it_can_use_and_others_of_its_lane_the_rest() -> None:
    bench = Bench(laned())
    bench.add("n", 1900)
    bench.add("m", 1900)
    bench.steps(2)
    for name, tokens in (("u", 10), ("v", 50)):
        bench.add(name, tokens, lane="urgent", output=1)
    assert bench.step() == {"n": 54, "u": 10}
    assert bench.step() == {"n": 32, "v": 32}
    assert bench.step() == {"v": 18, "n": 46}


def test_prompts_leave_nothing_to_an_urgent_one_that_does_not_come() -> None:
    bench = Bench(laned(), num_blocks=125, scheduler_reserve_full_isl=True)
    bench.add("n", 1900)
    bench.steps(18)
    bench.add("u", 900, lane="urgent")  # there is no room for it
    bench.step()
    assert bench.steps(8) == [{"n": 64}] * 8


def test_nor_to_one_that_comes_when_they_have_been_at_it_for_too_long() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0))
    bench.add("n", 1900)
    for number in range(10):
        bench.add(f"u{number}", 10, lane="urgent", output=1)
        assert bench.step()["n"] == 54
    bench.now += 1
    for number in range(10):
        bench.add(f"v{number}", 10, lane="urgent", output=1)
        assert bench.step() == {"n": 64}


def test_nor_to_an_overdue_one_that_does_not_come() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0), num_blocks=125, scheduler_reserve_full_isl=True)
    bench.add("u", 1900, lane="urgent")
    bench.steps(18)
    bench.add("late", 900)  # there is no room for it
    bench.now += 1
    bench.step()
    assert bench.steps(8) == [{"u": 64}] * 8


def test_batch_prompts_share_a_part_of_the_step_while_others_are_about() -> None:
    bench = Bench(laned(batch_share=0.25, reserve_slots=0))
    bench.add("b1", 640, lane="batch")
    bench.add("b2", 640, lane="batch")
    assert bench.step() == {"b1": 64}
    bench.add("n", 100)
    # A prompt of others has its step to itself; beside their decodes batch has its part.
    assert bench.step() == {"n": 64}
    assert bench.step() == {"n": 36}
    assert bench.step() == {"n": 1, "b1": 16}


def test_others_count_as_about_for_a_moment_after_they_left() -> None:
    bench = Bench(laned(batch_share=0.25, recent_s=5.0))
    bench.add("n", 10, output=1)
    bench.step()
    bench.add("b", 640, lane="batch")
    assert bench.step() == {"b": 16}
    bench.now += 4
    assert bench.step() == {"b": 16}
    bench.now += 2
    assert bench.step() == {"b": 64}


def test_an_overdue_prompt_is_computed_beside_others() -> None:
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
def test_an_overdue_prompt_begins_in_the_next_step_whatever_is_computed(
    lane: str | None, key: str, kind: type
) -> None:
    bench = Bench(laned(**{key: 5.0}), scheduler_cls=kind, async_scheduling=kind is PolicyScheduler)
    bench.add("u", 1900, lane="urgent")
    bench.step()
    bench.add("late", 300, lane=lane, output=1)
    assert bench.steps(2) == [{"u": 64}] * 2
    bench.now += 5
    # And goes on beside it: those who come when it is done would take the next of its steps.
    assert bench.steps(10) == [{"u": 32, "late": 32}] * 9 + [{"late": 12, "u": 52}]


def test_an_urgent_one_that_takes_its_turn_keeps_nobody_waiting_for_what_others_read() -> None:
    bench = Bench(laned(urgent_max_wait_s=4.0, normal_max_wait_s=5.0, batch_max_wait_s=5.0))
    bench.add("u", 1900, lane="urgent")
    bench.step()
    bench.add("n", 300, output=1)
    bench.add("b", 300, lane="batch")
    bench.add("v", 1900, lane="urgent")
    bench.now += 5
    assert bench.steps(3) == [{"u": 32, "n": 32}, {"n": 32, "v": 32}, {"n": 32, "b": 32}]
    # The overdue have one half together, the older first.
    assert bench.steps(6) == [{"n": 32, "u": 32}] * 6
    assert bench.steps(2) == [{"n": 12, "b": 20, "u": 32}, {"b": 32, "u": 32}]


@pytest.mark.parametrize(("lane", "key"), LESSER)
def test_who_comes_while_an_overdue_prompt_is_read_finds_half_of_the_step(
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


def test_beside_an_overdue_prompt_and_a_normal_one_an_urgent_one_finds_half_of_the_step() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, normal_max_wait_s=60.0))
    bench.add("n", 1900)
    bench.step()
    bench.add("b", 900, lane="batch")
    bench.now += 5
    assert bench.steps(2) == [{"n": 32, "b": 32}] * 2
    bench.add("u", 40, lane="urgent", output=1)
    assert bench.steps(2) == [{"b": 32, "u": 32}, {"b": 32, "u": 8, "n": 24}]


def test_overdue_prompts_one_after_the_other_leave_an_urgent_one_half_of_each_step() -> None:
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


def test_batch_goes_on_beside_one_that_finds_no_room() -> None:
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


def test_alone_batch_has_the_whole_step() -> None:
    bench = Bench(laned(batch_share=0.25))
    bench.add("b", 640, lane="batch")
    assert bench.steps(2) == [{"b": 64}, {"b": 64}]


@pytest.mark.parametrize(
    ("lane", "key"), [(None, "normal_max_wait_s"), ("batch", "batch_max_wait_s")]
)
def test_the_front_of_a_lane_waits_no_longer_than_its_bound(lane: str | None, key: str) -> None:
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
    # The bound, and the time until the next slot was free.
    assert 5.0 <= bench.now - 1000 <= 5.0 + 2.2
    assert bench["lanes"].counters()["starvation_releases"] == 1


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"long_prompt": {}},
        {"rotation": {"order": "shortest"}},
        {"long_prompt": {}, "rotation": {"order": "shortest"}},
    ],
    ids="+".join,
)
def test_overdue_ones_of_a_lane_are_released_one_at_a_time(
    beside: dict[str, dict[str, object]],
) -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_slots=0) | beside, max_num_seqs=4)
    for number in range(4):
        bench.add(f"u{number}", 10, lane="urgent", output=10)
    bench.step()
    # With a second policy a lane has several fronts: of lengths that differ.
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


def test_a_prompt_too_long_in_prefill_is_computed_before_the_urgent() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0), budget=64, max_num_seqs=16)
    bench.add("n", 1900)
    bench.step()
    for number in range(5):
        bench.add(f"u{number}", 1900, lane="urgent")
    assert bench.steps(10)[1:] == [{"u0": 64}] * 9
    bench.now += 2
    bench.step()  # in which it is seen how late it is
    assert bench.steps(3) == [{"n": 64}] * 3


def test_a_released_one_that_is_preempted_need_not_wait_again() -> None:
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
def test_a_released_one_that_stands_behind_others_stops_nobody(priorities: bool) -> None:
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


def test_who_runs_and_waits_is_shown_by_lane() -> None:
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


def test_nothing_is_kept_of_those_who_left() -> None:
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
def test_overdue_ones_that_take_every_slot_let_an_urgent_one_in(slots: int) -> None:
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
def test_urgent_ones_that_come_faster_than_they_are_served_shut_nobody_out(load: float) -> None:
    bench = Bench(
        laned(urgent_max_wait_s=2.0, normal_max_wait_s=5.0, batch_max_wait_s=15.0), max_num_seqs=4
    )
    served, count = 2.0, 0  # seconds that one is at work
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

    # Their front has waited for longer than its bound by then, and ever after.
    flood(1000 + 1.5 * served * load / (load - 1))
    since = bench.now
    bench.add("n", 10, output=20)
    bench.add("b", 10, lane="batch", output=20)
    flood(since + 25)
    assert 5.0 <= entered["n"] - since <= 5.0 + served
    assert 15.0 <= entered["b"] - since <= 15.0 + served
    assert any(name.startswith("u") and at > entered["b"] for name, at in entered.items())


def test_batch_prompts_go_on_beside_one_that_cannot_begin() -> None:
    bench = Bench(laned(batch_share=0.5, reserve_slots=0))
    bench.add("b", 1500, lane="batch")
    bench.steps(2)
    bench.turn_away("lora")
    bench.add("lora", 100)
    assert sum(step.get("b", 0) for step in bench.steps(18)) >= 15 * 32
