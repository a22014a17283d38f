"""What the admin API makes of a question."""

from __future__ import annotations

import pytest

from proxy.admin.schemas import Question, request_info_of, shown_worker
from proxy.health.worker_state import state
from tests.proxy.core.making import fleet_of, spec


@pytest.mark.parametrize(
    ("max_tokens", "expected", "long"),
    [
        (None, 256, False),  # the usual
        (50, 50, False),
        (500, 256, False),  # may write 500, usually 256
        (501, 256, True),
    ],
)
def test_a_question_is_sized_as_a_chat_would_be(
    max_tokens: int | None, expected: int, long: bool
) -> None:
    question = Question(prompt_tokens=500, max_tokens=max_tokens)
    ask = request_info_of(question, "tiny", usual_output=256, short_limit=1000)
    assert (ask.prompt_tokens, ask.prompt_error, ask.largest_prompt) == (500, 0, 500)
    assert (ask.output_tokens, ask.expected_output) == (max_tokens, expected)
    assert ask.long is long
    assert ask.counted


def test_a_worker_is_not_up_for_a_model_that_it_does_not_list() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    assert (state(worker), worker.why) == ("up", "")
    fleet.roster.set_served("a", ("m", "adapter"))
    assert (state(worker), worker.why) == ("up", "")
    fleet.roster.set_served("a", ("b", "c", "d"))
    assert (state(worker), worker.why) == ("wrong_model", "serves b, c, d, not m")
    fleet.roster.set_served("a", ("b", "c", "d", "e", "f"))
    assert shown_worker(worker, 1.0).why == "serves b, c, d and 2 more, not m"
    fleet.roster.set_served("a", ())  # it lists none to us
    assert (state(worker), worker.why) == ("up", "")


def test_of_one_that_is_down_the_last_probe_tells_why() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    for why in ("refused", "refused", "timed out"):
        assert worker.why == ""  # it is up as yet
        fleet.health.probe_failed("a", 1.0, why)
    assert (state(worker), worker.why) == ("down", "timed out")
    fleet.health.probe_ok("a", 2.0)
    assert worker.why == "timed out"  # once is not enough
    fleet.health.probe_ok("a", 3.0)
    assert (state(worker), worker.why) == ("up", "")
