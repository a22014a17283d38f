"""Counts of met and missed targets."""

from __future__ import annotations

import pytest

from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.tenants.tenants import Rank
from proxy.metrics.target_counts import TargetCounts
from tests.proxy.core.making import make_info
from tests.proxy.metrics.finished import finished

SETTINGS = AdmissionSettings({Rank.STANDARD: 2.0}, {Rank.STANDARD: 0.1})


@pytest.mark.parametrize(
    ("fields", "results"),
    [
        ({"ttft_s": 2.0, "tpot_s": 0.2}, {("ttft", "met"), ("tpot", "missed")}),
        ({"ttft_s": 2.1}, {("ttft", "missed")}),
        ({"ttft_s": None, "status": 429}, {("ttft", "refused")}),
        ({"ttft_s": None, "status": 499, "duration_s": 3.0}, {("ttft", "missed")}),
        ({"ttft_s": None, "status": 499, "duration_s": 1.0}, set()),
        ({"ttft_s": None, "status": 200, "stream": False, "duration_s": 9.0}, set()),
    ],
)
def test_results_by_target(fields: dict[str, object], results: set[tuple[str, str]]) -> None:
    counts = TargetCounts()
    done = finished(**{"stream": True, "status": 200, "duration_s": 5.0, **fields})  # type: ignore[arg-type]
    assert counts.count(make_info(), done, SETTINGS, 100.0) == 2.0
    assert {(target, result) for _, target, result in counts._results} == results


def test_clients_deadline_replaces_the_target() -> None:
    counts, info = TargetCounts(), make_info()
    info.deadline = 107.0
    done = finished(ttft_s=6.0, status=200)
    assert counts.count(info, done, SETTINGS, 100.0) == 7.0
    assert counts._results == {("standard", "deadline", "met"): 1}


def test_requests_without_targets_are_not_counted() -> None:
    counts = TargetCounts()
    assert counts.count(make_info(), finished(ttft_s=6.0), None, 0.0) is None
    assert not counts._results
