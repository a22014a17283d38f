"""Schemas of the admin API."""

from __future__ import annotations

import pytest

from proxy.admin.schemas import Question, request_info_of, shown_worker
from proxy.health.worker_state import state
from tests.proxy.core.making import fleet_of, spec


@pytest.mark.parametrize(
    ("max_tokens", "expected", "long"),
    [
        (None, 256, False),  # the usual output
        (50, 50, False),
        (500, 256, False),  # the limit is 500, the usual output 256
        (501, 256, True),
    ],
)
def test_explain_request_is_sized_like_a_chat(
    max_tokens: int | None, expected: int, long: bool
) -> None:
    question = Question(prompt_tokens=500, max_tokens=max_tokens)
    info = request_info_of(question, "tiny", usual_output=256, short_limit=1000)
    assert (info.prompt_tokens, info.prompt_error, info.largest_prompt) == (500, 0, 500)
    assert (info.output_tokens, info.expected_output) == (max_tokens, expected)
    assert info.long is long
    assert info.counted


def test_worker_that_does_not_list_its_model_is_wrong_model() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    assert (state(worker), worker.not_served_because) == ("up", "")
    fleet.roster.set_served("a", ("m", "adapter"))
    assert (state(worker), worker.not_served_because) == ("up", "")
    fleet.roster.set_served("a", ("b", "c", "d"))
    assert (state(worker), worker.not_served_because) == ("wrong_model", "serves b, c, d, not m")
    fleet.roster.set_served("a", ("b", "c", "d", "e", "f"))
    assert shown_worker(worker, 1.0).why == "serves b, c, d and 2 more, not m"
    fleet.roster.set_served("a", ())  # an empty list
    assert (state(worker), worker.not_served_because) == ("up", "")


def test_down_worker_shows_the_last_probe_error() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    for why in ("refused", "refused", "timed out"):
        assert worker.not_served_because == ""  # still up
        fleet.health.probe_failed("a", why)
    assert (state(worker), worker.not_served_because) == ("down", "timed out")
    fleet.health.probe_ok("a", 2.0)
    assert worker.not_served_because == "timed out"  # one good probe is not enough
    fleet.health.probe_ok("a", 3.0)
    assert (state(worker), worker.not_served_because) == ("up", "")
