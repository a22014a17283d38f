"""What is counted, as a scrape shows it."""

from __future__ import annotations

from typing import Protocol

from proxy.control.exposition import Page


class Counts(Protocol):
    """What shows itself on a page."""

    def show(self, page: Page) -> None:
        """Write all of it."""


def shown(counts: Counts) -> dict[str, float]:
    """Return every sample of a scrape."""
    page = Page(openmetrics=False)
    counts.show(page)
    lines = page.finish()[0].decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples}
