"""In a real engine shorts never stop: whoever a policy holds begins once its bound is over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.flood_scenes import BOUND_S, MANY, PLACES, SCENES, STEP_S

pytestmark = pytest.mark.engine

Sides = dict[str, dict[str, Any]]
FEW_STEPS = 10  # until a place is free
NOT_YET = 1e9


@pytest.mark.parametrize("name", SCENES)
def test_who_is_held_begins_soon_after_its_bound(floods: dict[str, Sides], name: str) -> None:
    bounded = floods[name]["bounded"]
    assert bounded["waited"] is not None
    if name == "deferred_prefill":  # whose number falls in the second half of it
        assert bounded["waited"] > BOUND_S / 2
    else:
        assert bounded["waited"] >= BOUND_S - 1e-9
        assert bounded["counters"]["starvation_releases"] == 1
    assert bounded["late_steps"] <= FEW_STEPS
    assert bounded["shorts_wait"] > 0, "they never stopped"


@pytest.mark.parametrize("name", SCENES)
def test_without_it_others_go_first_for_as_long_as_anybody_looked(
    floods: dict[str, Sides], name: str
) -> None:
    unbounded = floods[name]["unbounded"]
    assert unbounded["waited"] is None
    assert unbounded["steps"] > floods[name]["bounded"]["steps"] + 10
    assert unbounded["counters"]["starvation_releases"] == 0


def test_whom_it_goes_before_is_not_done(floods: dict[str, Sides]) -> None:
    long, lanes, deferred = (floods[name]["bounded"] for name in SCENES)
    assert long["before_told"] == 0, "the long one before it is still being read"
    assert min(long["shorts_passed"], lanes["shorts_passed"]) > 5
    assert deferred["before_done"] == 1, "of six that should have departed"


def test_the_last_of_many_waits_for_a_place_and_never_for_shorts(floods: dict[str, Sides]) -> None:
    """Those before it are let in when they are overdue, too: as many at once as share a step."""
    names = [*(f"before {number}" for number in range(len(MANY["before"]))), "held"]
    played = floods["many"]["bounded"]
    begun, told = played["begun"], played["told"]
    for number, name in enumerate(names):
        read = sorted(told.get(each, NOT_YET) for each in names[:number])
        has_place = read[number - PLACES] if number >= PLACES else 0.0
        due = max(has_place, BOUND_S if number else 0.0)
        assert begun[name] <= due + FEW_STEPS * STEP_S, name
    assert played["longs"] == PLACES
    assert played["shorts_passed"] > 5
    assert played["shorts_wait"] > 0, "they never stopped"
    assert floods["many"]["unbounded"]["longs"] == 1
