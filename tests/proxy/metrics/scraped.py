"""Metrics as a scrape shows them."""

from __future__ import annotations

from typing import Protocol

from proxy.metrics.exposition import MetricsPage
from proxy.metrics.page import slices
from proxy.metrics.registry import Metrics


class Counts(Protocol):
    """Counters that write themselves to a page."""

    def show(self, page: MetricsPage) -> None:
        """Write all samples."""


def written(page: MetricsPage) -> str:
    return b"".join(page.slices()).decode()


def scraped(metrics: Metrics, *, openmetrics: bool = False) -> str:
    return b"".join(slices(metrics, MetricsPage(openmetrics=openmetrics))).decode()


def shown(counts: Counts) -> dict[str, float]:
    page = MetricsPage(openmetrics=False)
    counts.show(page)
    lines = written(page).splitlines()
    samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples}
