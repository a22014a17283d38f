"""Late requests are recognised early, and no other request counts as late."""

from __future__ import annotations

import pytest

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.lateness import Lateness, ObservedFlight


def flight(late: Lateness, at: float = 0.0, output: int = 11) -> ObservedFlight:
    """Return a request that has arrived."""
    made = ObservedFlight(Request(at, "long", 1000, output), counts=True)
    late.arrived(made)
    return made


def lateness(**targets: float) -> Lateness:
    """Return a judge that tolerates first tokens up to 5 s and no late or lost request."""
    return Lateness(Targets(**targets), lambda _prompt: 5.0, 0, {"long": 0})


def test_request_is_late_before_its_late_first_token() -> None:
    late = lateness(ttft=2.0)
    request = flight(late)
    late.look(2.0)
    assert (request.late, late.too_many) == (False, False)
    late.look(2.1)
    assert (request.late, request.lost, late.too_many) == (True, False, True)
    late.look(5.1)
    assert request.lost


def test_first_token_in_time_meets_the_ttft_target() -> None:
    late = lateness(ttft=2.0)
    request = flight(late)
    request.first = 1.9
    late.first(request)
    late.look(100.0)
    assert not request.late


@pytest.mark.parametrize(("first", "lost"), [(3.0, False), (6.0, True)])
def test_late_first_token_is_lost_beyond_the_tolerance(first: float, lost: bool) -> None:
    late = lateness(ttft=2.0)
    request = flight(late)
    request.first = first
    late.first(request)
    assert (request.late, request.lost) == (True, lost)


def test_request_that_cannot_meet_tpot_is_lost() -> None:
    late = lateness(tpot=0.1)  # ten gaps: a second
    request = flight(late)
    request.first = 3.0
    late.first(request)
    late.look(4.0)
    assert not request.lost
    late.look(4.01)
    assert (request.late, request.lost) == (True, True)


def test_unfinished_request_beyond_e2el_is_late() -> None:
    late = lateness(e2el=4.0)
    request, other = flight(late), flight(late)
    late.ended(other, met=True, kept=True)
    late.look(4.1)
    assert (request.late, request.lost, other.late) == (True, False, False)


def test_late_request_counts_once_and_warm_up_requests_never() -> None:
    late = Lateness(Targets(ttft=1.0), lambda _prompt: 5.0, 1, {"long": 1})
    request = flight(late)
    late.look(9.0)
    late.ended(request, met=False, kept=False)
    warming = ObservedFlight(Request(0.0, "long", 1000, 11), counts=False)
    late.arrived(warming)
    late.look(9.0)
    late.ended(warming, met=False, kept=False)
    assert not late.too_many
    late.ended(flight(late), met=False, kept=False)
    assert late.too_many


def test_lost_requests_are_tolerated_up_to_the_class_limit() -> None:
    late = Lateness(Targets(), lambda _prompt: 5.0, most_lost={"long": 1})
    late.ended(flight(late), met=False, kept=True)
    late.ended(flight(late), met=False, kept=True)
    late.ended(flight(late), met=False, kept=False)
    assert not late.too_many
    late.ended(flight(late), met=False, kept=False)
    assert late.too_many
