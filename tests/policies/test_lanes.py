"""Lanes: urgent before normal before batch, reserves, and bounded waits."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import make_request
from tests.policies.making import Bench, Event, add, wait
from vllm_sched import PolicyScheduler, SyncPolicyScheduler

WHOLE_PROMPT = {"scheduler_reserve_full_isl": True}  # enters only if all of it has room
NO_RESERVE = {"reserve_kv": 0, "reserve_slots": 0}


def laned(**settings: object) -> dict[str, dict[str, object]]:
    return {"lanes": settings}


def urgent(name: str, tokens: int, **more: Any) -> Event:
    return add(name, tokens, lane="urgent", **more)


def batch(name: str, tokens: int, **more: Any) -> Event:
    return add(name, tokens, lane="batch", **more)


def dated(name: str, left_ms: float, tokens: int = 10) -> Event:
    return add(name, tokens, output=2, extra_args={"deadline_ms": left_ms})


# Order


def order_of_entry(*arrivals: Event, **settings: object) -> list[str]:
    """Return the order in which requests that arrive while no slot is free enter."""
    bench = Bench({**laned(**settings), "long_prompt": {}}, max_num_seqs=1)
    bench.decode("first", output=40)
    bench.play(*arrivals)
    return bench.entries()


def test_urgent_enters_before_normal_before_batch() -> None:
    lanes = batch("b", 10), add("n", 10), urgent("u", 900), add("m", 10, lane="normal")
    assert order_of_entry(*lanes) == ["u", "n", "m", "b"]
    # Without a lane, the priority counts.
    priorities = add("b", 10, priority=5), add("n", 10), add("u", 10, priority=-1)
    assert order_of_entry(*priorities, batch("a", 10, priority=-1)) == ["u", "n", "b", "a"]


def test_earliest_deadline_of_a_lane_enters_first() -> None:
    arrivals = add("none", 10), dated("loose", 20_000), dated("tight", 1_000), urgent("u", 10)
    # A deadline beyond the longest wait is none.
    longer = dated("beyond", 50_000), dated("long", 5_000, 1_000)
    order = ["u", "tight", "long", "loose", "none", "beyond"]
    assert order_of_entry(*arrivals, *longer) == order


def test_late_request_lets_those_pass_that_can_be_on_time() -> None:
    late = dated("over", -5), dated("late", 50), dated("later", 60)
    order = ["timely", "over", "late", "later"]
    assert order_of_entry(*late, wait(0.1), dated("timely", 3_000)) == order


def test_request_without_a_deadline_waits_no_longer_than_its_bound() -> None:
    arrivals = add("none", 10), wait(4.5), dated("tight", 400), dated("loose", 600)
    assert order_of_entry(*arrivals, normal_max_wait_s=5.0) == ["tight", "none", "loose"]


@pytest.mark.parametrize("lane", ["nosuch", 3, ["urgent"], None])
def test_unknown_lane_is_counted_and_served_as_normal(lane: object) -> None:
    lanes = Bench(laned())["lanes"]
    request = make_request(10)
    lanes.arrived(request, {"lane": lane})
    assert lanes.lane(request, int) == "normal"
    assert lanes.counters()["unknown_lanes"] == (lane is not None)


# The tokens of each step


def test_urgent_prompt_takes_only_the_tokens_that_it_needs() -> None:
    bench = Bench(laned())
    bench.play(add("n", 1900), add("m", 1900), 2, urgent("u", 10), urgent("v", 50, output=1))
    bench.play({"n": 54, "u": 10}, {"u": 1, "n": 32, "v": 31})


def test_no_tokens_are_kept_for_urgent_prompts_by_an_overdue_prefill() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0))
    bench.play(add("n", 1900), urgent("u", 10, output=1), {"n": 54, "u": 10}, wait(1))
    bench.play(urgent("v", 10, output=1), {"n": 64}, urgent("w", 10, output=1), {"n": 64})


def test_batch_prompts_get_batch_share_while_other_lanes_are_active() -> None:
    bench = Bench(laned(batch_share=0.25, reserve_slots=0))
    bench.play(batch("b1", 640), batch("b2", 640), {"b1": 64}, add("n", 100))
    # Another lane's prompt has the whole step; beside its decodes batch has its share.
    bench.play({"n": 64}, {"n": 36}, {"n": 1, "b1": 16})


def test_other_lanes_count_as_active_for_recent_s_after_they_left() -> None:
    bench = Bench(laned(batch_share=0.25, recent_s=5.0))
    bench.play(add("n", 10, output=1), 1, batch("b", 640), {"b": 16}, wait(4), {"b": 16})
    bench.play(wait(2), {"b": 64}, {"b": 64})


def test_batch_is_held_in_the_step_that_admits_another_prompt() -> None:
    Bench(laned(reserve_slots=0)).play(add("n", 40), batch("b", 10), {"n": 40}, {"n": 1, "b": 8})


def test_overdue_prompts_share_a_half_beside_an_urgent_prompt() -> None:
    bench = Bench(laned(normal_max_wait_s=5.0, batch_max_wait_s=5.0))
    bench.play(urgent("u", 1900), 1, add("n", 300, output=1), batch("b", 300), wait(5))
    # The older is first.
    bench.play({"u": 32, "n": 32}, {"n": 32, "b": 32}, *[{"n": 32, "u": 32}] * 7)
    bench.play({"n": 12, "b": 20, "u": 32}, {"b": 32, "u": 32})


def test_urgent_prompt_gets_half_beside_an_overdue_and_a_normal_prompt() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, normal_max_wait_s=60.0))
    bench.play(add("n", 1900), 1, batch("b", 900), wait(5), *[{"n": 32, "b": 32}] * 2)
    bench.play(urgent("u", 40, output=1), {"b": 32, "u": 32}, {"b": 32, "u": 8, "n": 24})


def test_overdue_prefill_is_computed_before_urgent_prompts() -> None:
    bench = Bench(laned(normal_max_wait_s=1.0))
    bench.play(add("n", 1900), 1, urgent("u", 1900), urgent("v", 1900), 1, *[{"u": 64}] * 9)
    bench.play(wait(2), 1, *[{"n": 64}] * 3)  # one step finds that it is overdue


LESSER = [(None, "normal_max_wait_s"), ("batch", "batch_max_wait_s")]


@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
@pytest.mark.parametrize(("lane", "key"), LESSER)
def test_overdue_prompt_begins_in_the_next_step(lane: str | None, key: str, kind: type) -> None:
    bench = Bench(laned(**{key: 5.0}), scheduler_cls=kind, async_scheduling=kind is PolicyScheduler)
    bench.play(urgent("u", 1900), 1, add("late", 300, lane=lane, output=1), *[{"u": 64}] * 2)
    # The urgent prompt continues beside it.
    bench.play(wait(5), *[{"u": 32, "late": 32}] * 9, {"late": 12, "u": 52})


@pytest.mark.parametrize("beside", [{}, {"long_prompt": {}}], ids="+".join)
@pytest.mark.parametrize(("runs", "lane"), [(None, "urgent"), ("urgent", None)])
def test_no_tokens_are_kept_for_a_better_prompt_without_room(
    runs: str | None, lane: str | None, beside: dict[str, dict[str, object]]
) -> None:
    """It is urgent, or overdue."""
    policies = laned(normal_max_wait_s=1.0 if runs else 60.0) | beside
    bench = Bench(policies, num_blocks=125, **WHOLE_PROMPT)
    bench.play(add("long", 1900, lane=runs), 18, add("better", 900, lane=lane), wait(1), 2)
    bench.play(*[{"long": 64}] * 8)


# Reserves and holds


def test_batch_leaves_reserved_slots_free() -> None:
    bench = Bench(laned(reserve_slots=0.25), max_num_seqs=8)
    bench.play(*(batch(f"b{number}", 10, output=50) for number in range(20)), 5)
    assert len(bench.running) == 6
    assert bench["lanes"].held_reason("batch") == "reserve"
    bench.play(urgent("u", 10), add("n", 10), 1)
    assert bench.running >= {"u", "n"}


@pytest.mark.parametrize(("budget", "steps", "entered"), [(64, 20, 4), (2000, 1, 5)])
def test_batch_leaves_reserved_kv_free(budget: int, steps: int, entered: int) -> None:
    bench = Bench(laned(reserve_kv=0.5, reserve_slots=0), num_blocks=101, budget=budget)
    bench.play(*(batch(f"b{number}", 16 * 10, output=50) for number in range(10)), steps)
    # Ten blocks each at first; half of the cache is reserved.
    assert len(bench.running) == entered


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [({"n1": 200, "n2": 200}, "others_wait"), ({"n1": 300}, "others_prefill")],
)
def test_batch_is_held_while_others_wait_or_are_computed(
    prompts: dict[str, int], reason: str
) -> None:
    bench = Bench(laned(reserve_slots=0))
    bench.add_all(prompts)
    bench.play(1, batch("b", 10), 2)
    assert bench.running == {"n1"}
    assert bench["lanes"].held_reason("batch") == reason
    bench.until(lambda: "b" in bench.running)
    assert not any(request.is_prefill_chunk for request in bench.scheduler.running[:-1])


def test_idle_session_does_not_hold_batch() -> None:
    """The session keeps its blocks until its client continues, possibly never."""
    bench = Bench(laned(reserve_kv=0.5), num_blocks=60)
    session = make_request(600, output=2)
    session.resumable = True
    bench.scheduler.add_request(session)
    bench.steps(12)
    assert not bench.running
    assert bench.scheduler.kv_cache_manager.usage > 0.5
    bench.play(batch("b", 10), {"b": 10})


def test_batch_does_not_pass_an_urgent_request_without_room() -> None:
    bench = Bench(laned(**NO_RESERVE), num_blocks=41, budget=256)
    bench.play(add("n", 300, output=100), 2, urgent("u", 500), batch("b", 16), 10)
    assert bench.running == {"n"}
    bench.drain()


# Preemption


def test_newest_request_of_the_lowest_lane_is_preempted_first() -> None:
    bench = Bench(laned(**NO_RESERVE), num_blocks=65, budget=512)
    for name, lane in (("b1", "batch"), ("n1", "normal"), ("b2", "batch"), ("u", "urgent")):
        bench.play(add(name, 200, lane=lane, output=600), 1)
    bench.add("n2", 200, output=600)
    gone: list[str] = []
    while len(gone) < 4:
        before = bench.running
        bench.step()
        gone += before - bench.running
    assert gone == ["b2", "b1", "n2", "n1"]


@pytest.mark.parametrize(("decodes", "prompt"), [("batch", "urgent"), ("urgent", "batch")])
def test_batch_is_preempted_first_while_a_prompt_is_computed(decodes: str, prompt: str) -> None:
    bench = Bench(laned(**NO_RESERVE, batch_share=1.0), num_blocks=41, budget=24)
    names = {"a", "b", "c", "d"}
    bench.add_all(dict.fromkeys(sorted(names), 50), lane=decodes, output=300)
    bench.until(lambda: bench.running == names)
    bench.steps(3)
    computed = bench.add("prompt", 350, lane=prompt, output=2)
    bench.until(lambda: len(bench.running) == 5)
    bench.until(lambda: len(bench.running) < 5)
    assert computed.is_prefill_chunk or computed.status == RequestStatus.PREEMPTED
    assert ("prompt" in bench.running) == (prompt == "urgent")


def test_long_running_answer_keeps_the_class_of_its_lane() -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_kv=0), num_blocks=41, budget=512)
    bench.play(batch("b", 300, output=900), 1, wait(60), urgent("u", 200, output=900))
    bench.until(lambda: bench.running == {"b", "u"})
    bench.until(lambda: bench.running != {"b", "u"})
    assert bench.running == {"u"}


def test_service_classes_of_decodes_are_cached() -> None:
    """A full cache needs the classes in each step, and hundreds of calls are slow."""
    bench = Bench(laned(**NO_RESERVE), num_blocks=59, budget=512)
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
    ask = classes.class_of
    classes.class_of = lambda request: calls.append(request) or ask(request)
    classes._decode_classes.clear()
    bench.steps(10)
    assert len(calls) == len(lanes)
    # Decodes keep their order, and finished requests leave the cache.
    order = [r.request_id.rstrip("0123456789") for r in scheduler.running]
    assert order == ["urgent"] * 5 + ["normal"] * 5 + ["batch"] * 5
    bench.abort(*bench.running)
    assert not classes._decode_classes


def test_changed_service_class_takes_effect_at_once() -> None:
    """A released request has the first class; after a preemption another may get it."""
    bench = Bench(laned(**NO_RESERVE, batch_max_wait_s=5.0), num_blocks=200)
    lanes, classes = bench["lanes"], bench.scheduler._planner.classes
    requests = [bench.add(name, 10, lane="batch", output=600) for name in ("one", "two")]
    bench.steps(2)
    before = lanes.class_changes
    assert [lanes.service_class(request) for request in requests] == [2, 2]
    lanes._overdue.released["batch"] = "one"
    assert classes.classes_of_decodes(requests) == dict(zip(requests, (0, 2), strict=True))
    # Another request is released while the first is preempted.
    lanes._running.discard("one")
    lanes._overdue._first_heads["two"] = True
    lanes.admitted(requests[1])
    assert lanes.class_changes > before
    assert classes.classes_of_decodes(requests) == dict(zip(requests, (2, 0), strict=True))
    lanes.departed(requests[1], bench.now)
    assert classes.classes_of_decodes(requests[:1]) == {requests[0]: 2}


# Bounded waits


class Flooded(Bench):
    """A bench in which so many requests of a kind always wait."""

    def __init__(self, settings: dict[str, object], slots: int, waiting: int, **flood: Any) -> None:
        self.waiting, self.flood, self.count = waiting, flood, 0
        self.lanes: list[str | None] = flood.pop("lanes", ["urgent"])
        priority = flood.pop("priorities", False)
        super().__init__(laned(**settings), max_num_seqs=slots, priority=priority)

    def step(self, seconds: float = 0.05) -> dict[str, int]:
        while len(self.scheduler.waiting) < self.waiting:
            self.count += 1
            lane = self.lanes[self.count % len(self.lanes)]
            self.add(f"x{self.count}", 10, lane=lane, **self.flood)
        return super().step(seconds)

    def seconds_until(self, *names: str) -> float:
        begun = self.now
        while not {*names} <= self.running:
            self.step()
            assert self.now - begun < 10.0
        return self.now - begun


@pytest.mark.parametrize(("lane", "key"), LESSER)
def test_head_of_a_lane_waits_at_most_its_bound(lane: str | None, key: str) -> None:
    bench = Flooded({key: 5.0}, slots=4, waiting=8, output=20)
    bench.step()
    bench.add("held", 10, lane=lane)
    # The bound, and the time until the next free slot.
    assert 5.0 <= bench.seconds_until("held") <= 5.0 + 1.2
    assert bench["lanes"].counters()["starvation_releases"] == 1


@pytest.mark.parametrize("priorities", [False, True])
def test_released_request_behind_others_blocks_no_request(priorities: bool) -> None:
    settings = {"batch_max_wait_s": 5.0, "reserve_slots": 0}
    bench = Flooded(settings, slots=3, waiting=0, output=3, priorities=priorities)
    earlier = bench.add("earlier", 10, lane="batch", output=200)
    bench.step(0.01)
    bench.waiting = 8
    bench.step(0.01)
    released = bench.add("released", 10, lane="batch", output=200, priority=9)
    bench.now += 6
    bench.until(lambda: "released" in bench.running, 100)
    for victim in (released, earlier):
        bench.preempt(victim)
    bench.add("better", 10, lane="batch", output=3, priority=1)
    assert bench.seconds_until("earlier", "released") < 8


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_overdue_requests_in_every_slot_let_an_urgent_request_enter(slots: int) -> None:
    settings = {
        "batch_max_wait_s": 5.0, "normal_max_wait_s": 5.0, "urgent_max_wait_s": 2.0,
        "reserve_slots": 0,
    }  # fmt: skip
    bench = Flooded(settings, slots, waiting=40, lanes=[None, "batch"], output=20)
    bench.steps(200)
    bench.add("u", 10, lane="urgent")
    assert bench.seconds_until("u") < 4.0


@pytest.mark.parametrize(
    "beside", [{}, {"long_prompt": {}}, {"long_prompt": {}, "rotation": {}}], ids="+".join
)
def test_overdue_requests_of_a_lane_are_released_one_at_a_time(
    beside: dict[str, dict[str, object]],
) -> None:
    bench = Bench(laned(batch_max_wait_s=5.0, reserve_slots=0) | beside, max_num_seqs=4)
    urgents = iter(range(10_000))
    bench.play(*(urgent(f"u{next(urgents)}", 10, output=10) for _ in range(4)), 1)
    # With a second policy a lane has several heads, of different lengths.
    for number in range(12):
        bench.add(f"b{number}", 900 if number % 4 == 1 else 10, lane="batch", output=10)
    bench.now += 6
    entered = 0
    for _ in range(100):
        while len(bench.scheduler.waiting) < 20:
            bench.add(f"u{next(urgents)}", 10, lane="urgent", output=10)
        before = bench.running
        bench.step()
        entered += sum(name.startswith("b") for name in bench.running - before)
        assert sum(name.startswith("b") for name in bench.running) <= 1
    assert entered >= 4
    assert bench["lanes"].counters()["starvation_releases"] == entered


@pytest.mark.parametrize("load", [1.04, 1.25])
def test_urgent_overload_does_not_starve_other_lanes(load: float) -> None:
    settings = {"urgent_max_wait_s": 2.0, "normal_max_wait_s": 5.0, "batch_max_wait_s": 15.0}
    bench = Bench(laned(**settings), max_num_seqs=4)
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
    bench.play(add("n", 10, output=20), batch("b", 10, output=20))
    flood(since + 25)
    assert 5.0 <= entered["n"] - since <= 5.0 + served
    assert 15.0 <= entered["b"] - since <= 15.0 + served
    assert any(name.startswith("u") and at > entered["b"] for name, at in entered.items())


# State


def test_gauges_count_running_and_waiting_by_lane() -> None:
    bench = Bench(laned(), max_num_seqs=2)
    bench.play(urgent("u", 10), add("n", 10), add("n2", 10), batch("b", 10), 2)
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
        extra_args = {"lane": "batch" if number % 2 else "urgent", "deadline_ms": 1_000}
        bench.add(str(number), 10, extra_args=extra_args)
    bench.steps(2)
    lanes = bench["lanes"]
    assert lanes._time_to_deadline_s
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.step()
    bench.abort("5")
    bench.drain()
    assert lanes._requested_lanes == lanes._time_to_deadline_s == lanes._running.requests == {}
    assert lanes._overdue.released == {}
    assert set(lanes._running.counts.values()) == {0}


def test_first_turn_is_that_of_an_overdue_request() -> None:
    arrivals = urgent("u", 10), batch("b", 10), wait(20)
    settings = {"batch_max_wait_s": 5.0, "urgent_max_wait_s": 10.0}
    assert order_of_entry(*arrivals, **settings) == ["b", "u"]
