"""Static batching: each batch forms and runs to its end before the next."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.making import Bench, Event, add, add_all, wait


def play(settings: dict[str, object], *events: Event, **engine: Any) -> Bench:
    bench = Bench({"static_batching": settings}, **engine)
    bench.play(*events)
    return bench


@pytest.mark.parametrize(
    ("settings", "engine"), [({}, {"max_num_seqs": 2}), ({"size": 2}, {})], ids=["slots", "size"]
)
def test_next_batch_begins_after_the_last_member(
    settings: dict[str, object], engine: dict[str, int]
) -> None:
    events = [add("short", 10, output=2), add("long", 10, output=6), add_all("ab", 10, output=2)]
    steps = [{"short": 10, "long": 10}, {"short": 1, "long": 1}, *[{"long": 1}] * 4]
    play(settings, *events, *steps, {"a": 10, "b": 10}, **engine)


def test_batch_forms_over_several_steps() -> None:
    bench = Bench({"static_batching": {}}, max_num_seqs=7)
    bench.add_all({"a": 100, "b": 30, "c": 100, "d": 20}, output=20)
    bench.steps(5)
    assert bench.running == set("abcd")
    assert bench["static_batching"].gauges()["batch_members"] == 4
    assert bench["static_batching"].effective_settings()["size"] == 7


def test_step_without_admissions_closes_the_batch() -> None:
    # When `b` arrives, the batch is still forming.
    events = [add("a", 10), 1, add("b", 10), {"a": 1, "b": 10}, 1, add("c", 10), {"a": 1, "b": 1}]
    policy = play({}, *events)["static_batching"]
    assert policy.gauges()["batch_forming"] == 0
    assert policy.held_reason("next") == "batch_running"


def test_request_without_room_closes_the_batch() -> None:
    events = [add("a", 320, output=5), add("b", 400, output=5), 1, add("c", 16, output=5)]
    play({}, *events, *[{"a": 1}] * 4, {"b": 400, "c": 16}, num_blocks=41, budget=1000)


def test_preempted_member_returns_while_others_run() -> None:
    bench = Bench({"static_batching": {}})
    bench.add("a", 10, output=50)
    victim = bench.add("b", 10, output=50)
    bench.steps(3)
    bench.add("late", 10)
    bench.preempt(victim)
    bench.step()
    assert bench.running == {"a", "b"}


def test_wait_for_a_batch_is_bounded() -> None:
    events = [add("a", 10, output=1000), 3, add("late", 10), wait(4.9), {"a": 1}, {"a": 1}]
    bench = play({"max_wait_s": 5}, *events, wait(0.2), {"a": 1, "late": 10})
    assert bench["static_batching"].counters() == {"starvation_releases": 1}


def test_request_with_kv_blocks_joins_the_batch_without_a_release() -> None:
    bench = play({}, add("a", 10, output=30), 3)
    holder = bench.add("holder", 20)
    bench.scheduler.waiting.remove_request(holder)
    bench.scheduler.kv_cache_manager.allocate_slots(holder, 16)
    holder.num_computed_tokens = 16
    bench.scheduler.kv_holding_waiting.add_request(holder)
    bench.step()
    assert bench.running == {"a", "holder"}
    assert bench["static_batching"].counters() == {"starvation_releases": 0}
