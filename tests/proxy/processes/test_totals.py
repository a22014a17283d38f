"""The metrics of all processes together."""

from __future__ import annotations

from proxy.processes.totals import Totals
from tests.proxy.processes.test_pages import page


def summed(totals: Totals, found: dict[int, str]) -> dict[str, str]:
    """Add up what was said, and read the lines."""
    written, _ = totals.page(found, serving=2, restarts=4, openmetrics=False)
    lines = written.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_it_says_how_many_serve_and_began_again() -> None:
    found = summed(Totals(), {0: page({"a": 1}, 1, 1)})
    assert float(found["proxy_processes"]) == 2
    assert float(found["proxy_process_restarts_total"]) == 4


def test_one_that_is_late_counts_as_it_did_last() -> None:
    totals = Totals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    found = summed(totals, {0: page({"a": 5}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 7
    assert float(found["proxy_client_connections"]) == 3


def test_one_that_is_no_more_leaves_its_counts_and_no_gauges() -> None:
    totals = Totals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    totals.gone(1)
    found = summed(totals, {0: page({"a": 1}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 3
    assert float(found["proxy_client_connections"]) == 1
