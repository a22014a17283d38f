"""The event queue."""

from __future__ import annotations

from vllm_sched.sim.fleet.events import EventQueue


def test_calls_run_in_order_of_time_rank_and_entry() -> None:
    agenda, calls = EventQueue(), []
    for name, when, rank in [("d", 2.0, 0), ("c", 1.0, 1), ("a", 1.0, 0), ("b", 1.0, 0)]:
        agenda.schedule(when, lambda now, name=name: calls.append((name, now)), rank=rank)  # type: ignore[misc]
    while agenda.next_at() < float("inf"):
        agenda.step()
    assert calls == [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 2.0)]


def test_call_in_the_past_runs_now() -> None:
    agenda, made = EventQueue(), []
    agenda.schedule(5.0, lambda now: agenda.schedule(now - 1, made.append))
    agenda.step()
    agenda.step()
    assert made == [5.0]
    assert agenda.now == 5.0
