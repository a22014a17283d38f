"""Metrics of many processes on one page."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from grafana.declared import router_families
from proxy.metrics.batch_counts import PAUSED
from proxy.metrics.exposition import OPENMETRICS, TEXT, Family, MetricsPage
from proxy.metrics.histogram import Histogram
from proxy.metrics.registry import Metrics
from proxy.processes import metrics_merge
from tests.proxy.core.making import router_of, spec
from tests.proxy.metrics.finished import finished
from tests.proxy.metrics.scraped import scraped, written

# Gauges that are equal in all processes; the leader's value is shown. A new gauge belongs here or
# in `SUMMED_GAUGES` or `ANY_PROCESS`.
EQUAL = {
    "proxy_build_info",
    "proxy_bytes_per_token",
    "proxy_discovery_up",
    "proxy_discovery_workers",
    "proxy_pool_panic",
    "proxy_queue_limit_requests",
    "proxy_journal_requests",
    "proxy_journal_up",
    "proxy_replicas",
    "proxy_sessions",
    "proxy_shared_age_seconds",
    "proxy_shared_limits_up",
    "proxy_shared_up",
}

REQUESTS = Family("proxy_requests", "counter", "Requests.", ("worker",))
INFLIGHT = Family("proxy_worker_inflight_requests", "gauge", "In flight.", ("worker",))
USAGE = Family("proxy_worker_kv_usage_ratio", "gauge", "As reported.", ("worker",))
CLIENTS = Family("proxy_client_connections", "gauge", "Clients.")
TIMES = Family("proxy_ttft_seconds", "histogram", "Times.", ("pool",))
BYTES = Family("proxy_transfer_bytes", "counter", "Bytes that workers tell.", ("worker",))


def page(requests: dict[str, int], inflight: int, clients: int, *times: float) -> str:
    metrics_page = MetricsPage(openmetrics=False)
    metrics_page.values(REQUESTS, (((worker,), count) for worker, count in requests.items()))
    metrics_page.values(INFLIGHT, [(("a",), inflight)])
    metrics_page.values(USAGE, [(("a",), inflight / 10)])
    metrics_page.values(CLIENTS, [((), clients)])
    seen = Histogram((0.1, 1.0))
    for time in times:
        seen.observe(time)
    metrics_page.histograms(TIMES, [(("short",), seen)])
    metrics_page.values(BYTES, [(("a",), 1e12)])
    return written(metrics_page)


def sums(*texts: str) -> dict[str, float]:
    """Add pages, and return the samples of the sum."""
    total = metrics_merge.add_up(map(metrics_merge.read, texts))
    text = metrics_merge.write(total, openmetrics=False)[0].decode()
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("paused", [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_batches_are_paused_if_any_process_pauses_them(paused: tuple[int, int]) -> None:
    """With a database, each process sends lines."""
    pages = []
    for value in paused:
        metrics_page = MetricsPage(openmetrics=False)
        metrics_page.values(PAUSED, [((), value)])
        pages.append(written(metrics_page))
    assert sums(*pages)["proxy_batches_paused"] == max(paused)


def test_counters_histograms_and_some_gauges_add_up() -> None:
    """Other gauges are the leader's."""
    found = sums(page({"a": 3}, 2, 5, 0.05, 0.5), page({"a": 4, "b": 1}, 3, 6, 0.05, 3.0))
    assert found["proxy_requests_totala"] == 7
    assert found["proxy_requests_totalb"] == 1
    assert found["proxy_client_connections"] == 11
    assert found["proxy_worker_inflight_requestsa"] == 5
    assert found["proxy_worker_kv_usage_ratioa"] == 0.2
    assert found["proxy_transfer_bytes_totala"] == 1e12
    assert found["proxy_ttft_seconds_bucketshort0.1"] == 2
    assert found["proxy_ttft_seconds_bucketshort+Inf"] == 4
    assert found["proxy_ttft_seconds_countshort"] == 4
    assert found["proxy_ttft_seconds_sumshort"] == pytest.approx(3.6)


def test_label_value_may_be_any_text() -> None:
    name = 'a b} 7\\"\u2028\x85\x0c\r\n# '
    assert sums(page({name: 3}, 0, 0), page({name: 4}, 0, 0))[f"proxy_requests_total{name}"] == 7


def test_only_own_counters_and_histograms_of_a_process_are_permanent() -> None:
    past = metrics_merge.own_counts(metrics_merge.read(page({"a": 3}, 2, 5, 0.5)))
    assert set(past) == {"proxy_requests_total", "proxy_ttft_seconds"}


def test_processes_and_descriptors_add_up() -> None:
    text = scraped(Metrics(router_of(spec("a"))))
    found, alone = sums(text, text), sums(text)
    assert found["proxy_processes"] == 2
    assert found["process_max_fds"] == 2 * alone["process_max_fds"]
    assert found["process_open_fds"] == 2 * alone["process_open_fds"]


def test_single_page_is_unchanged() -> None:
    router = router_of(spec("a"), spec('b"\\\n'))
    metrics = Metrics(router)
    metrics.count_request(finished(model="m", worker="a", ttft_s=0.1, placed_s=0.0))
    for openmetrics, parse in ((False, read_text), (True, read_openmetrics)):
        text = scraped(metrics, openmetrics=openmetrics)
        again, kind = metrics_merge.write(
            metrics_merge.read(scraped(metrics)), openmetrics=openmetrics
        )
        assert kind == (OPENMETRICS if openmetrics else TEXT)
        found, wanted = ([*parse(lines)] for lines in (again.decode(), text))
        assert [family for family in found if not family.name.startswith("process_")] == [
            family for family in wanted if not family.name.startswith("process_")
        ]
        assert len(found) == len(wanted)


def test_breaker_state_is_the_leaders() -> None:
    """Otherwise a worker could briefly have two states."""
    states = Family("proxy_worker_breaker_state", "gauge", "How it is.", ("worker", "state"))

    def page_of(*rows: tuple[str, str]) -> str:
        found = MetricsPage(openmetrics=False)
        found.values(states, ((row, 1) for row in rows))
        return written(found)

    late = page_of(("a", "open"), ("b", "open"))
    assert sums(page_of(("a", "half_open")), late) == {"proxy_worker_breaker_stateahalf_open": 1}
    assert sums(page_of(), late) == {}


def test_every_gauge_has_a_rule_for_its_sum() -> None:
    gauges = {family.name for family in router_families() if family.kind == "gauge"}
    assert len(gauges) > 15
    of_workers = {name for name in gauges if name.startswith("proxy_worker_")}
    known = of_workers | metrics_merge.SUMMED_GAUGES | metrics_merge.ANY_PROCESS | EQUAL
    assert gauges - known == set(), (
        "add it to SUMMED_GAUGES or ANY_PROCESS of proxy/processes/metrics_merge.py, or to EQUAL"
    )
