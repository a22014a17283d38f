"""The turns of overdue requests."""

from __future__ import annotations

import pytest

from tests.policies.closed_loop import FakeRequest
from vllm_sched.policies.service_classes.overdue import OverdueTurns
from vllm_sched.policies.service_classes.running import RunningLanes


@pytest.mark.parametrize(
    ("name", "preemptions", "waited", "due"),
    [
        ("released", 1, 0.0, True),
        ("before it", 1, 0.0, True),
        ("new", 0, 9.0, False),
        ("new", 0, 10.0, True),
    ],
)
def test_preempted_front_goes_first_while_the_released_request_waits(
    name: str, preemptions: int, waited: float, due: bool
) -> None:
    turns = OverdueTurns({"batch": 10.0}, RunningLanes(["batch"]))
    turns.released["batch"] = "released"
    head = FakeRequest(name, num_preemptions=preemptions)
    assert turns.check_head("batch", head, waited) is due
