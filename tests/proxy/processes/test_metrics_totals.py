"""The metrics of all processes together."""

from __future__ import annotations

from itertools import count

import pytest

from proxy.metrics.exposition import Family, MetricsPage
from proxy.metrics.registry import Metrics
from proxy.processes.metrics_totals import MetricsTotals
from tests.proxy.core.making import router_of, spec
from tests.proxy.metrics.finished import finished
from tests.proxy.metrics.scraped import scraped, written
from tests.proxy.processes.test_metrics_merge import page

NUMBERS = count(1)


def summed(totals: MetricsTotals, found: dict[int, str], number: int = 0) -> dict[str, str]:
    """Add up what was said, and read the lines."""
    number = number or next(NUMBERS)
    written, _ = totals.page(found, number=number, serving=2, restarts=4, openmetrics=False)
    lines = written.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_it_says_how_many_serve_and_began_again() -> None:
    found = summed(MetricsTotals(), {0: page({"a": 1}, 1, 1)})
    assert float(found["proxy_processes"]) == 2
    assert float(found["proxy_process_restarts_total"]) == 4


def test_one_that_is_late_counts_as_it_did_last() -> None:
    totals = MetricsTotals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    found = summed(totals, {0: page({"a": 5}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 7
    assert float(found["proxy_client_connections"]) == 3


def test_one_that_is_no_more_leaves_its_counts_and_no_gauges() -> None:
    totals = MetricsTotals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    totals.gone(1)
    found = summed(totals, {0: page({"a": 1}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 3
    assert float(found["proxy_client_connections"]) == 1


def process(*workers: str) -> Metrics:
    """Make what a process counts that knows these workers."""
    return Metrics(router_of(*map(spec, workers)))


def serve(counts: Metrics, worker: str, times: int = 1) -> None:
    """Count requests, a retry, a client that left and a bar of that worker's."""
    for _ in range(times):
        counts.request_done(finished(model="m", worker=worker, ttft_s=0.1))
    counts.retried(worker, "reset")
    counts.unseen.gone(worker, "general", "m", "short", 1.0, stream=True)
    counts.handovers.barred(worker, "any")


def told(counts: Metrics) -> str:
    """Write its page."""
    return scraped(counts)


def test_pods_that_come_and_go_leave_no_series_once_who_served_them_is_dead_too() -> None:
    totals, before = MetricsTotals(), process("pod-1")
    for worker in ("pod-1", "none", "other"):
        serve(before, worker)
    summed(totals, {0: told(before), 1: told(process("pod-1"))})
    totals.gone(0)
    stays = summed(totals, {1: told(process("pod-1"))})
    assert sum("pod-1" in series for series in stays) > 10
    gone = summed(totals, {1: told(process("pod-2"))})
    assert not [series for series in gone if "pod-1" in series]
    for name in ('worker="none"', 'worker="other"'):
        kept = [series for series in gone if name in series]
        assert len(kept) > 10
        assert kept == [series for series in stays if name in series]
    assert float(gone['proxy_ttft_seconds_count{pool="none",model="m",class="none"}']) == 3


def test_a_worker_that_left_keeps_what_the_dead_counted_while_another_process_shows_it() -> None:
    """The sum would fall, which is a restart to whoever reads it."""
    totals, dead, alive = MetricsTotals(), process("pod-1"), process("pod-1")
    serve(dead, "pod-1", 100)
    serve(alive, "pod-1", 50)
    summed(totals, {0: told(dead), 1: told(alive)})
    totals.gone(0)
    alive.router.fleet.roster.remove("pod-1")
    alive.router.fleet.roster.add(spec("pod-2"))
    found = summed(totals, {1: told(alive)})
    counted = [float(n) for s, n in found.items() if "requests_total" in s and "pod-1" in s]
    assert counted == [150]


def test_nothing_is_forgotten_while_nobody_knows_a_worker() -> None:
    totals, dead = MetricsTotals(), process("pod-1")
    serve(dead, "pod-1")
    summed(totals, {0: told(dead)})
    totals.gone(0)
    summed(totals, {})
    summed(totals, {0: told(process())})
    found = summed(totals, {0: told(process("pod-1"))})
    assert sum("pod-1" in series for series in found) > 10


def test_what_one_process_does_not_know_yet_another_or_a_late_one_does() -> None:
    totals, dead = MetricsTotals(), process("pod-1")
    serve(dead, "pod-1")
    old = told(process("listed", "pod-1"))
    summed(totals, {0: told(dead), 1: old})
    totals.gone(0)
    for _ in range(2):
        found = summed(totals, {0: told(process("listed"))})
        assert sum("pod-1" in series for series in found) > 10


def test_a_name_with_quotes_is_one_of_the_fleet() -> None:
    name, totals = 'a,worker="b"\\', MetricsTotals()
    dead = process(name)
    serve(dead, name)
    summed(totals, {0: told(dead)})
    totals.gone(0)
    found = summed(totals, {0: told(process(name))})
    assert any("requests_total" in series for series in found if "a,worker" in series)


def counted(found: dict[str, str], what: str) -> list[float]:
    """Find what was counted of one worker or model."""
    return [
        float(n) for series, n in found.items() if "requests_total" in series and what in series
    ]


A_100 = page({"a": 100, "b": 1}, 1, 1)
A_50, A_51 = page({"a": 50, "b": 1}, 1, 1), page({"a": 51, "b": 1}, 1, 1)
NO_A = page({"b": 2}, 1, 1)


def test_a_sum_does_not_fall_while_processes_drop_series_one_by_one() -> None:
    totals = MetricsTotals()
    assert counted(summed(totals, {0: A_100, 1: A_50}), '"a"') == [150]
    assert counted(summed(totals, {0: NO_A, 1: A_50}), '"a"') == [150]
    found = summed(totals, {0: NO_A, 1: A_51})
    assert (counted(found, '"a"'), counted(found, '"b"')) == ([151], [3])
    assert counted(summed(totals, {0: NO_A}), '"a"') == [151]  # the other is late
    assert counted(summed(totals, {0: NO_A, 1: NO_A}), '"a"') == []
    assert counted(summed(totals, {0: A_50, 1: NO_A}), '"a"') == [50]  # it begins anew


@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_last_one_drops_is_gone_with_what_the_dead_counted(at_once: bool) -> None:
    """Models too, of which nobody lists those that there are."""

    def told(model: str) -> str:
        told = MetricsPage(openmetrics=False)
        told.values(Family("proxy_requests", "counter", "R.", ("model",)), [((model,), 7)])
        told.values(Family("proxy_worker_up", "gauge", "U.", ("worker",)), [(("w",), 1)])
        return written(told)

    totals = MetricsTotals()
    summed(totals, {0: told("m"), 1: told("m"), 2: told("m")})
    totals.gone(2)
    if not at_once:
        assert counted(summed(totals, {0: told("n"), 1: told("m")}), '"m"') == [21]
    found = summed(totals, {0: told("n"), 1: told("n")})
    assert (counted(found, '"m"'), counted(found, '"n"')) == ([], [14])


def test_a_series_that_is_dropped_and_begun_anew_between_two_pages_does_not_fall() -> None:
    totals = MetricsTotals()
    summed(totals, {0: A_100, 1: A_50})
    assert counted(summed(totals, {0: page({"a": 1}, 1, 1), 1: A_50}), '"a"') == [151]
    assert counted(summed(totals, {0: page({"a": 3}, 1, 1), 1: A_51}), '"a"') == [154]
    assert counted(summed(totals, {0: NO_A, 1: NO_A}), '"a"') == []


def test_of_a_histogram_that_is_begun_anew_all_buckets_count_on() -> None:
    """Those too that have as many again: a wider one never has less."""
    totals = MetricsTotals()
    summed(totals, {0: page({}, 1, 1, 0.05, 0.5, 0.5, 5.0)})
    found = summed(totals, {0: page({}, 1, 1, 0.05, 0.05, 0.05)})
    shown = [float(n) for series, n in found.items() if "ttft" in series and "sum" not in series]
    assert shown == [4, 6, 7, 7]


def test_a_sum_that_a_rounding_error_makes_less_is_not_begun_anew() -> None:
    totals = MetricsTotals()
    summed(totals, {0: page({}, 1, 1, 0.0)})
    found = summed(totals, {0: page({}, 1, 1, 0.0, -1e-17)})
    assert found['proxy_ttft_seconds_count{pool="short"}'] == "2"


def test_an_answer_that_was_overtaken_by_a_later_one_is_not_taken() -> None:
    totals = MetricsTotals()
    summed(totals, {0: A_100, 1: A_50})
    first, second = next(NUMBERS), next(NUMBERS)
    assert counted(summed(totals, {0: NO_A, 1: A_50}, second), '"a"') == [150]
    assert counted(summed(totals, {0: A_100, 1: A_50}, first), '"a"') == [150]
    assert counted(summed(totals, {0: NO_A, 1: A_50}), '"a"') == [150]


def test_a_worker_that_came_back_counts_on_from_what_is_there_still() -> None:
    totals = MetricsTotals()
    summed(totals, {0: A_100, 1: A_50})
    summed(totals, {0: NO_A, 1: A_50})
    assert counted(summed(totals, {0: page({"a": 1}, 1, 1), 1: A_50}), '"a"') == [151]
