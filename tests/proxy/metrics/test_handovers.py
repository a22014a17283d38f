"""What is said when no prefill worker is up."""

from __future__ import annotations

import logging

import pytest

from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.metrics.handovers import ANY, LOG_INTERVAL_S, FallbackLog, HandoverCounters
from tests.proxy.core.making import MODEL, router_of, spec

SAID = "no prefill worker is up: {} requests were served without a hand-over"


def test_it_is_said_once_a_minute_and_how_often_it_was(caplog: pytest.LogCaptureFixture) -> None:
    here = router_of(spec("g0"))
    said = FallbackLog(here)
    with caplog.at_level(logging.WARNING):
        said.look(0.0)
        assert not caplog.messages
        here.placer.handovers[MODEL, HandoverVerdict.NO_PREFILL] = 3
        said.look(1.0)
        here.placer.handovers[MODEL, HandoverVerdict.NO_PREFILL] = 5
        said.look(2.0)
        assert caplog.messages == [
            "no prefill worker is up: 3 requests were served without a hand-over"
        ]
        said.look(1.0 + LOG_INTERVAL_S)
        said.look(9 * LOG_INTERVAL_S)
    assert caplog.messages[1:] == [
        "no prefill worker is up: 2 requests were served without a hand-over"
    ]


def test_bars_and_legs_of_workers_that_left_are_dropped() -> None:
    counts = HandoverCounters(str)
    for prefill, decode in (("p0", "d0"), ("p0", ANY), ("gone", "d0"), ("p0", "gone")):
        counts.barred(prefill, decode)
    counts.legs |= {"p0": 3, "gone": 2}
    counts.forget({"p0", "d0"})
    assert counts.bars == {("p0", "d0"): 1, ("p0", ANY): 1}
    assert counts.legs == {"p0": 3}
