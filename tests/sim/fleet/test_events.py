"""What happens when."""

from __future__ import annotations

from vllm_sched.sim.fleet.events import EventQueue


def test_calls_are_made_in_the_order_of_time_rank_and_entry() -> None:
    agenda, made = EventQueue(), []
    for name, when, rank in [("d", 2.0, 0), ("c", 1.0, 1), ("a", 1.0, 0), ("b", 1.0, 0)]:
        agenda.at(when, lambda now, name=name: made.append((name, now)), rank=rank)  # type: ignore[misc]
    while agenda.next_at() < float("inf"):
        agenda.step()
    assert made == [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 2.0)]


def test_what_is_late_is_made_now() -> None:
    agenda, made = EventQueue(), []
    agenda.at(5.0, lambda now: agenda.at(now - 1, made.append))
    agenda.step()
    agenda.step()
    assert made == [5.0]
    assert agenda.now == 5.0
