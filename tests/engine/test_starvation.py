"""In a real engine under endless shorts, a held request begins after its bound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.flood_scenes import BOUND_S, MANY, PLACES, SCENES, STEP_S

pytestmark = pytest.mark.engine

Sides = dict[str, dict[str, Any]]
FEW_STEPS = 10  # until a slot is free
NOT_YET = 1e9


@pytest.mark.parametrize("name", SCENES)
def test_held_request_begins_soon_after_its_bound(floods: dict[str, Sides], name: str) -> None:
    bounded = floods[name]["bounded"]
    assert bounded["waited"] is not None
    if name == "deferred_prefill":  # its threshold falls in the second half
        assert bounded["waited"] > BOUND_S / 2
    else:
        assert bounded["waited"] >= BOUND_S - 1e-9
        assert bounded["counters"]["starvation_releases"] == 1
    assert bounded["late_steps"] <= FEW_STEPS
    assert bounded["shorts_wait"] > 0, "shorts never stopped"


@pytest.mark.parametrize("name", SCENES)
def test_request_without_a_bound_is_passed_all_the_time(
    floods: dict[str, Sides], name: str
) -> None:
    unbounded = floods[name]["unbounded"]
    assert unbounded["waited"] is None
    assert unbounded["steps"] > floods[name]["bounded"]["steps"] + 10
    assert unbounded["counters"]["starvation_releases"] == 0


def test_held_request_enters_before_earlier_requests_are_done(floods: dict[str, Sides]) -> None:
    long, lanes, deferred = (floods[name]["bounded"] for name in SCENES)
    assert long["before_first_tokens"] == 0, "the earlier long prompt is still in prefill"
    assert min(long["shorts_passed"], lanes["shorts_passed"]) > 5
    assert deferred["before_done"] == 1, "one of six requests departed"


def test_last_of_many_longs_waits_for_a_place_but_not_for_shorts(floods: dict[str, Sides]) -> None:
    """Earlier longs also enter when they are overdue, up to `PLACES` at once."""
    names = [*(f"before {number}" for number in range(len(MANY["before"]))), "held"]
    played = floods["many"]["bounded"]
    begun, first_tokens = played["begun"], played["first_tokens"]
    for number, name in enumerate(names):
        read = sorted(first_tokens.get(earlier, NOT_YET) for earlier in names[:number])
        has_place = read[number - PLACES] if number >= PLACES else 0.0
        due = max(has_place, BOUND_S if number else 0.0)
        assert begun[name] <= due + FEW_STEPS * STEP_S, name
    # A long that a step completes has left its place.
    assert PLACES - 1 <= played["longs"] <= PLACES
    assert played["shorts_passed"] > 5
    assert played["shorts_wait"] > 0, "shorts never stopped"
    assert floods["many"]["unbounded"]["longs"] == 1
