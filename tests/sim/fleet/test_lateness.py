"""Who is late is known early, and nobody is said to be who is not."""

from __future__ import annotations

import pytest

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.lateness import Lateness, ObservedFlight


def flight(late: Lateness, at: float = 0.0, output: int = 11) -> ObservedFlight:
    """Let one arrive."""
    made = ObservedFlight(Request(at, "long", 1000, output), counts=True)
    late.arrived(made)
    return made


def lateness(**targets: float) -> Lateness:
    """Bear a first token after 5 s, and nobody who is late, nor lost."""
    return Lateness(Targets(**targets), lambda _prompt: 5.0, 0, {"long": 0})


def test_who_has_no_first_token_in_time_is_late_before_it_comes() -> None:
    late = lateness(ttft=2.0)
    each = flight(late)
    late.look(2.0)
    assert (each.late, late.too_many) == (False, False)
    late.look(2.1)
    assert (each.late, each.lost, late.too_many) == (True, False, True)
    late.look(5.1)
    assert each.lost


def test_a_first_token_in_time_is_enough() -> None:
    late = lateness(ttft=2.0)
    each = flight(late)
    each.first = 1.9
    late.first(each)
    late.look(100.0)
    assert not each.late


@pytest.mark.parametrize(("first", "lost"), [(3.0, False), (6.0, True)])
def test_a_first_token_that_is_late_may_be_borne(first: float, lost: bool) -> None:
    late = lateness(ttft=2.0)
    each = flight(late)
    each.first = first
    late.first(each)
    assert (each.late, each.lost) == (True, lost)


def test_who_can_no_longer_keep_the_pace_is_lost() -> None:
    late = lateness(tpot=0.1)  # ten gaps: a second
    each = flight(late)
    each.first = 3.0
    late.first(each)
    late.look(4.0)
    assert not each.lost
    late.look(4.01)
    assert (each.late, each.lost) == (True, True)


def test_who_is_not_done_in_time_is_late() -> None:
    late = lateness(e2el=4.0)
    each, other = flight(late), flight(late)
    late.ended(other, met=True, kept=True)
    late.look(4.1)
    assert (each.late, each.lost, other.late) == (True, False, False)


def test_each_is_counted_once_and_those_that_find_the_fleet_empty_never() -> None:
    late = Lateness(Targets(ttft=1.0), lambda _prompt: 5.0, 1, {"long": 1})
    each = flight(late)
    late.look(9.0)
    late.ended(each, met=False, kept=False)
    warming = ObservedFlight(Request(0.0, "long", 1000, 11), counts=False)
    late.arrived(warming)
    late.look(9.0)
    late.ended(warming, met=False, kept=False)
    assert not late.too_many
    late.ended(flight(late), met=False, kept=False)
    assert late.too_many


def test_of_a_class_as_many_as_may_be_lost_are_borne() -> None:
    late = Lateness(Targets(), lambda _prompt: 5.0, most_lost={"long": 1})
    late.ended(flight(late), met=False, kept=True)
    late.ended(flight(late), met=False, kept=True)
    late.ended(flight(late), met=False, kept=False)
    assert not late.too_many
    late.ended(flight(late), met=False, kept=False)
    assert late.too_many
