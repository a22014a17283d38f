"""Totals of the metrics of all processes."""

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
    number = number or next(NUMBERS)
    written, _ = totals.merge(found, number=number, serving=2, restarts=4, openmetrics=False)
    lines = written.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def counts_of(found: dict[str, str], what: str) -> list[float]:
    """Return the request counts of series with a text."""
    return [
        float(n) for series, n in found.items() if "requests_total" in series and what in series
    ]


def test_late_process_counts_with_its_last_page_and_a_dead_one_without_gauges() -> None:
    totals = MetricsTotals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    found = summed(totals, {0: page({"a": 5}, 1, 1)})
    assert counts_of(found, '"a"') == [7]
    assert float(found["proxy_client_connections"]) == 3
    totals.keep_counters(1)
    found = summed(totals, {0: page({"a": 5}, 1, 1)})
    assert counts_of(found, '"a"') == [7]
    assert float(found["proxy_client_connections"]) == 1
    assert (found["proxy_processes"], found["proxy_process_restarts_total"]) == ("2", "4")


def process(*workers: str) -> Metrics:
    return Metrics(router_of(*map(spec, workers)))


def serve(counts: Metrics, worker: str, times: int = 1) -> None:
    """Count requests, a retry, a client that left and a bar of a worker."""
    for _ in range(times):
        counts.count_request(finished(model="m", worker=worker, ttft_s=0.1))
    counts.count_retry(worker, "reset")
    counts.no_first_token.observe_disconnect(worker, "general", "m", "short", 1.0, stream=True)
    counts.handovers.count_barred(worker, "any")


def test_series_of_removed_workers_end_with_dead_processes() -> None:
    totals, before = MetricsTotals(), process("pod-1")
    for worker in ("pod-1", "none", "other"):
        serve(before, worker)
    summed(totals, {0: scraped(before), 1: scraped(process("pod-1"))})
    totals.keep_counters(0)
    before_removal = summed(totals, {1: scraped(process("pod-1"))})
    assert sum("pod-1" in series for series in before_removal) > 10
    gone = summed(totals, {1: scraped(process("pod-2"))})
    assert not [series for series in gone if "pod-1" in series]
    for name in ('worker="none"', 'worker="other"'):
        kept = [series for series in gone if name in series]
        assert len(kept) > 10
        assert kept == [series for series in before_removal if name in series]
    assert float(gone['proxy_ttft_seconds_count{pool="none",model="m",class="none"}']) == 3


def test_counts_of_a_dead_process_stay_while_another_shows_the_worker() -> None:
    """A lower sum would look like a restart."""
    totals, dead, alive = MetricsTotals(), process("pod-1"), process("pod-1")
    serve(dead, "pod-1", 100)
    serve(alive, "pod-1", 50)
    summed(totals, {0: scraped(dead), 1: scraped(alive)})
    totals.keep_counters(0)
    alive.router.fleet.roster.remove("pod-1")
    alive.router.fleet.roster.add(spec("pod-2"))
    assert counts_of(summed(totals, {1: scraped(alive)}), "pod-1") == [150]


@pytest.mark.parametrize("late", [(), ("listed", "pod-1")])
def test_counts_stay_while_the_worker_may_be_listed(late: tuple[str, ...]) -> None:
    """No process lists workers, or one that is late lists this one."""
    totals, dead = MetricsTotals(), process("pod-1")
    serve(dead, "pod-1")
    summed(totals, {0: scraped(dead)} | ({1: scraped(process(*late))} if late else {}))
    totals.keep_counters(0)
    for _ in range(2):
        found = summed(totals, {0: scraped(process(*late[:1]))})
    if not late:
        found = summed(totals, {0: scraped(process("pod-1"))})
    assert sum("pod-1" in series for series in found) > 10


def test_worker_name_with_quotes_is_recognised() -> None:
    name, totals = 'a,worker="b"\\', MetricsTotals()
    dead = process(name)
    serve(dead, name)
    summed(totals, {0: scraped(dead)})
    totals.keep_counters(0)
    found = summed(totals, {0: scraped(process(name))})
    assert any("requests_total" in series for series in found if "a,worker" in series)


A_100 = page({"a": 100, "b": 1}, 1, 1)
A_50, A_51 = page({"a": 50, "b": 1}, 1, 1), page({"a": 51, "b": 1}, 1, 1)
NO_A = page({"b": 2}, 1, 1)


def test_sum_does_not_fall_while_processes_drop_a_series() -> None:
    totals = MetricsTotals()
    assert counts_of(summed(totals, {0: A_100, 1: A_50}), '"a"') == [150]
    assert counts_of(summed(totals, {0: NO_A, 1: A_50}), '"a"') == [150]
    found = summed(totals, {0: NO_A, 1: A_51})
    assert (counts_of(found, '"a"'), counts_of(found, '"b"')) == ([151], [3])
    assert counts_of(summed(totals, {0: NO_A}), '"a"') == [151]  # process 1 is late
    assert counts_of(summed(totals, {0: NO_A, 1: NO_A}), '"a"') == []
    assert counts_of(summed(totals, {0: A_50, 1: NO_A}), '"a"') == [50]  # restarts from zero


@pytest.mark.parametrize("at_once", [True, False])
def test_series_ends_when_the_last_process_drops_it(at_once: bool) -> None:
    """Models too, which no process lists."""

    def page_of(model: str) -> str:
        page_of = MetricsPage(openmetrics=False)
        page_of.values(Family("proxy_requests", "counter", "R.", ("model",)), [((model,), 7)])
        page_of.values(Family("proxy_worker_up", "gauge", "U.", ("worker",)), [(("w",), 1)])
        return written(page_of)

    totals = MetricsTotals()
    summed(totals, {0: page_of("m"), 1: page_of("m"), 2: page_of("m")})
    totals.keep_counters(2)
    if not at_once:
        assert counts_of(summed(totals, {0: page_of("n"), 1: page_of("m")}), '"m"') == [21]
    found = summed(totals, {0: page_of("n"), 1: page_of("n")})
    assert (counts_of(found, '"m"'), counts_of(found, '"n"')) == ([], [14])


@pytest.mark.parametrize("between", [None, NO_A], ids=["at once", "after a page without it"])
def test_restarted_series_does_not_fall(between: str | None) -> None:
    totals = MetricsTotals()
    summed(totals, {0: A_100, 1: A_50})
    if between is not None:
        summed(totals, {0: between, 1: A_50})
    assert counts_of(summed(totals, {0: page({"a": 1}, 1, 1), 1: A_50}), '"a"') == [151]
    assert counts_of(summed(totals, {0: page({"a": 3}, 1, 1), 1: A_51}), '"a"') == [154]
    assert counts_of(summed(totals, {0: NO_A, 1: NO_A}), '"a"') == []


def test_restarted_histogram_continues_in_all_buckets() -> None:
    """Buckets with equal counts continue too: a wider bucket never has less."""
    totals = MetricsTotals()
    summed(totals, {0: page({}, 1, 1, 0.05, 0.5, 0.5, 5.0)})
    found = summed(totals, {0: page({}, 1, 1, 0.05, 0.05, 0.05)})
    shown = [float(n) for series, n in found.items() if "ttft" in series and "sum" not in series]
    assert shown == [4, 6, 7, 7]


def test_rounding_error_is_not_a_restart() -> None:
    totals = MetricsTotals()
    summed(totals, {0: page({}, 1, 1, 0.0)})
    found = summed(totals, {0: page({}, 1, 1, 0.0, -1e-17)})
    assert found['proxy_ttft_seconds_count{pool="short"}'] == "2"


def test_overtaken_answer_is_ignored() -> None:
    totals = MetricsTotals()
    summed(totals, {0: A_100, 1: A_50})
    first, second = next(NUMBERS), next(NUMBERS)
    assert counts_of(summed(totals, {0: NO_A, 1: A_50}, second), '"a"') == [150]
    assert counts_of(summed(totals, {0: A_100, 1: A_50}, first), '"a"') == [150]
    assert counts_of(summed(totals, {0: NO_A, 1: A_50}), '"a"') == [150]
