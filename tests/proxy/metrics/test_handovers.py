"""Counters of hand-overs, and the log of missing prefill workers."""

from __future__ import annotations

import logging

import pytest

from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.metrics.handovers import ANY, LOG_INTERVAL_S, FallbackLog, HandoverCounters
from tests.proxy.core.making import MODEL, router_of, spec


def test_missing_prefill_workers_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(spec("g0"))
    log = FallbackLog(router)
    with caplog.at_level(logging.WARNING):
        log.log_new(0.0)
        assert not caplog.messages
        router.placer.handovers[MODEL, HandoverVerdict.NO_PREFILL] = 3
        log.log_new(1.0)
        router.placer.handovers[MODEL, HandoverVerdict.NO_PREFILL] = 5
        log.log_new(2.0)
        assert caplog.messages == [
            "no prefill worker is up: 3 requests were served without a hand-over"
        ]
        log.log_new(1.0 + LOG_INTERVAL_S)
        log.log_new(9 * LOG_INTERVAL_S)
    assert caplog.messages[1:] == [
        "no prefill worker is up: 2 requests were served without a hand-over"
    ]


def test_counters_of_removed_workers_are_dropped() -> None:
    counts = HandoverCounters(str)
    for prefill, decode in (("p0", "d0"), ("p0", ANY), ("gone", "d0"), ("p0", "gone")):
        counts.count_barred(prefill, decode)
    counts.legs |= {"p0": 3, "gone": 2}
    counts.forget({"p0", "d0"})
    assert counts.bars == {("p0", "d0"): 1, ("p0", ANY): 1}
    assert counts.legs == {"p0": 3}
