"""What is counted, as a scrape shows it."""

from __future__ import annotations

from typing import Protocol

from proxy.metrics.exposition import MetricsPage
from proxy.metrics.registry import Metrics
from proxy.metrics.scrape import slices


class Counts(Protocol):
    """What shows itself on a page."""

    def show(self, page: MetricsPage) -> None:
        """Write all of it."""


def written(page: MetricsPage) -> str:
    """Write a page at one go."""
    return b"".join(page.slices()).decode()


def scraped(metrics: Metrics, *, openmetrics: bool = False) -> str:
    """Write what a scrape shows, at one go."""
    return b"".join(slices(metrics, MetricsPage(openmetrics=openmetrics))).decode()


def shown(counts: Counts) -> dict[str, float]:
    """Return every sample of a scrape."""
    page = MetricsPage(openmetrics=False)
    counts.show(page)
    lines = written(page).splitlines()
    samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples}
