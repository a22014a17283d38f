"""Static batching: each batch forms and runs to its end before the next."""

from __future__ import annotations

from tests.policies.making import Bench


def batching(**settings: object) -> dict[str, dict[str, object]]:
    return {"static_batching": settings}


def test_next_batch_begins_after_the_last_member() -> None:
    bench = Bench(batching(), max_num_seqs=2)
    bench.add("short", 10, output=2)
    bench.add("long", 10, output=6)
    bench.add("next", 10, output=2)
    bench.add("other", 10, output=2)
    for _ in range(6):
        assert not bench.running & {"next", "other"}
        bench.step()
    assert bench.running == set()
    bench.step()
    assert bench.running == {"next", "other"}
    bench.drain()


def test_free_slot_stays_empty_while_the_batch_runs() -> None:
    bench = Bench(batching())
    bench.add("a", 10, output=5)
    bench.step()
    bench.step()
    bench.add("late", 10)
    for _ in range(3):
        assert bench.step() == {"a": 1}
    assert bench.step() == {"late": 10}


def test_batch_forms_over_several_steps() -> None:
    bench = Bench(batching(), budget=64)
    for name, tokens in zip("abcd", (100, 30, 100, 20), strict=True):
        bench.add(name, tokens, output=20)
    bench.steps(5)
    assert bench.running == set("abcd")
    assert bench["static_batching"].gauges()["batch_members"] == 4


def test_step_without_admissions_closes_the_batch() -> None:
    bench = Bench(batching())
    bench.add("a", 10)
    bench.step()
    bench.add("b", 10)  # the batch is still forming
    bench.step()
    assert bench.running == {"a", "b"}
    bench.step()
    bench.add("c", 10)
    bench.step()
    assert bench.running == {"a", "b"}
    assert bench["static_batching"].gauges()["batch_forming"] == 0
    assert bench["static_batching"].held_reason("next") == "batch_running"


def test_size_setting_bounds_the_batch() -> None:
    bench = Bench(batching(size=2))
    for name in "abc":
        bench.add(name, 10, output=3)
    bench.steps(3)
    assert bench.running == set()
    bench.step()
    assert bench.running == {"c"}


def test_default_size_is_the_number_of_slots() -> None:
    assert Bench(batching(), max_num_seqs=7)["static_batching"].resolved()["size"] == 7


def test_request_without_room_closes_the_batch() -> None:
    bench = Bench(batching(), num_blocks=41, budget=1000)
    bench.add("a", 320, output=5)
    bench.add("b", 400, output=5)
    bench.steps(2)
    bench.add("c", 16, output=5)
    bench.steps(2)
    assert bench.running == {"a"}
    bench.drain()


def test_members_preempted_by_a_cache_reset_return() -> None:
    bench = Bench(batching())
    bench.add("a", 10, output=50)
    bench.add("b", 10, output=50)
    bench.steps(3)
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.steps(3)
    bench.add("late", 10)
    bench.steps(3)
    assert bench.running == {"a", "b"}


def test_preempted_member_returns_while_others_run() -> None:
    bench = Bench(batching())
    bench.add("a", 10, output=50)
    victim = bench.add("b", 10, output=50)
    bench.steps(3)
    bench.add("late", 10)
    bench.scheduler.running.remove(victim)
    bench.scheduler._preempt_request(victim, 0.0)
    bench.step()
    assert bench.running == {"a", "b"}


def test_wait_for_a_batch_is_bounded() -> None:
    bench = Bench(batching(max_wait_s=5))
    bench.add("a", 10, output=1000)
    bench.steps(3)
    bench.add("late", 10)
    bench.step(4.9)
    bench.step()
    assert bench.running == {"a"}
    bench.now += 0.2
    bench.step()
    assert bench.running == {"a", "late"}
    assert bench["static_batching"].counters() == {"starvation_releases": 1}


def test_request_with_kv_blocks_joins_the_batch_without_a_release() -> None:
    bench = Bench(batching())
    bench.add("a", 10, output=30)
    bench.steps(3)
    holder = bench.add("holder", 20)
    bench.scheduler.waiting.remove_request(holder)
    bench.scheduler.kv_cache_manager.allocate_slots(holder, 16)
    holder.num_computed_tokens = 16
    bench.scheduler.kv_holding_waiting.add_request(holder)
    bench.step()
    assert bench.running == {"a", "holder"}
    assert bench["static_batching"].counters() == {"starvation_releases": 0}
