"""Both text formats, read back by the reference parsers."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from proxy.metrics.exposition import OPENMETRICS, SLICE_LINES, TEXT, Family, MetricsPage
from proxy.metrics.histogram import GAP_BOUNDS, Histogram
from tests.proxy.metrics.scraped import written

REQUESTS = Family("proxy_requests", "counter", "Requests.", ("model", "status"))
UP = Family("proxy_up", "gauge", "Whether it is up.")
GAPS = Family("proxy_gap_seconds", "histogram", "Gaps.", ("pool",))
READERS = {False: read_text, True: read_openmetrics}


@pytest.fixture(params=[False, True], ids=["text", "openmetrics"])
def openmetrics(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def read(page: MetricsPage, *, openmetrics: bool) -> dict[str, Metric]:
    """Parse a page with the strict reference parser."""
    assert page.kind == (OPENMETRICS if openmetrics else TEXT)
    return {family.name: family for family in READERS[openmetrics](written(page))}


def test_counters_and_gauges_are_written(openmetrics: bool) -> None:
    page = MetricsPage(openmetrics=openmetrics)
    page.values(REQUESTS, [(("tiny", 200), 3), (("tiny", 404), 1)])
    page.values(UP, [((), 0.5)])
    families = read(page, openmetrics=openmetrics)
    requests = families["proxy_requests"]
    assert (requests.type, requests.documentation) == ("counter", "Requests.")
    assert [(s.name, s.labels, s.value) for s in requests.samples] == [
        ("proxy_requests_total", {"model": "tiny", "status": "200"}, 3),
        ("proxy_requests_total", {"model": "tiny", "status": "404"}, 1),
    ]
    assert [(s.labels, s.value) for s in families["proxy_up"].samples] == [({}, 0.5)]


def test_histogram_is_cumulative(openmetrics: bool) -> None:
    gaps = Histogram((0.01, 0.1))
    for gap in (0.005, 0.01, 0.05, 7):
        gaps.observe(gap)
    page = MetricsPage(openmetrics=openmetrics)
    page.histograms(GAPS, [(("short",), gaps)])
    family = read(page, openmetrics=openmetrics)["proxy_gap_seconds"]
    assert family.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets == {"0.01": 2, "0.1": 3, "+Inf": 4}  # a value on a bound is within it
    rest = {s.name: s.value for s in family.samples if not s.name.endswith("_bucket")}
    assert rest["proxy_gap_seconds_count"] == 4
    assert math.isclose(rest["proxy_gap_seconds_sum"], 7.065)


def test_slices_have_limited_lines(openmetrics: bool) -> None:
    page = MetricsPage(openmetrics=openmetrics)
    page.values(REQUESTS, [(("tiny", number), number) for number in range(10 * SLICE_LINES)])
    page.histograms(
        GAPS, [((str(number),), Histogram(GAP_BOUNDS)) for number in range(SLICE_LINES)]
    )
    page.values(UP, [((), 1)])
    pieces = list(page.slices())
    assert max(piece.count(b"\n") for piece in pieces) <= SLICE_LINES + len(GAP_BOUNDS) + 5
    assert b"".join(pieces).count(b"\nproxy_gap_seconds_") == SLICE_LINES * (len(GAP_BOUNDS) + 3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-9, 2**60, True])
def test_special_numbers_are_written(openmetrics: bool, value: float) -> None:
    page = MetricsPage(openmetrics=openmetrics)
    page.values(UP, [((), value)])
    assert read(page, openmetrics=openmetrics)["proxy_up"].samples[0].value == value


def test_empty_families_are_written(openmetrics: bool) -> None:
    page = MetricsPage(openmetrics=openmetrics)
    page.values(REQUESTS, [])
    page.histograms(GAPS, [(("short",), Histogram(GAP_BOUNDS))])
    assert set(read(page, openmetrics=openmetrics)) == {"proxy_requests", "proxy_gap_seconds"}


@settings(deadline=None)
@given(st.text(), st.booleans())
@example(r"a\nb", False)
@example('"\n\\', True)
@example("\udce9t", False)
def test_any_label_value_is_preserved(value: str, openmetrics: bool) -> None:
    """Invalid Unicode is replaced."""
    page = MetricsPage(openmetrics=openmetrics)
    page.values(REQUESTS, [((value, 200), 1)])
    sample = read(page, openmetrics=openmetrics)["proxy_requests"].samples[0]
    assert sample.labels["model"] == value.encode(errors="replace").decode()
