"""Metrics as text, in Prometheus's format and in OpenMetrics'.

Written by hand because every stream waits while that is done: a line takes 1 to 3 us, where a
library's writer takes 10. And in slices, between which streams go on: a fleet of a thousand workers
has tens of thousands of lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from proxy.metrics.histogram import Histogram

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OTHER = "other"  # the label of whatever has no series of its own
SLICE = 500  # lines that are written at a time, and the rest of a histogram


class Family(NamedTuple):
    """A metric: what it is called, what it means, how its series are told apart."""

    name: str  # a counter's without `_total`
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class MetricsPage:
    """One answer to a scrape: what it is to tell, and then how it is written."""

    def __init__(self, *, openmetrics: bool) -> None:
        self.kind = OPENMETRICS if openmetrics else TEXT
        self._openmetrics = openmetrics
        self._told: list[tuple[Family, list[tuple[Sequence[object], float | Histogram]]]] = []

    def values(self, family: Family, rows: Iterable[tuple[Sequence[object], float]]) -> None:
        """Tell a counter or a gauge: label values and the number, for each series."""
        self._told.append((family, [*rows]))

    def histograms(
        self, family: Family, rows: Iterable[tuple[Sequence[object], Histogram]]
    ) -> None:
        """Tell a histogram: label values and the counts, for each series."""
        self._told.append((family, [*rows]))

    def slices(self) -> Iterator[bytes]:
        """Write the page piece by piece; between two of them whoever asks may do something else."""
        lines: list[str] = []
        for family, rows in self._told:
            name = self._head(family, lines)
            for labels, value in rows:
                own = pairs(family.labels, labels)
                if isinstance(value, Histogram):
                    self._histogram(name, own, value, lines)
                else:
                    lines.append(f"{name}{braces(own)} {number(value)}")
                if len(lines) >= SLICE:
                    lines.append("")
                    yield "\n".join(lines).encode()
                    lines.clear()
        if self._openmetrics:
            lines.append("# EOF")
        lines.append("")
        yield "\n".join(lines).encode()

    def _histogram(self, name: str, own: str, histogram: Histogram, lines: list[str]) -> None:
        start = f'{name}_bucket{{{own}{"," if own else ""}le="'
        first, counts = len(lines), histogram.cumulative()
        bounds = [*map(repr, histogram.bounds), "+Inf"]
        lines += [f'{start}{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
        if self._openmetrics and histogram.exemplars:
            for index, (value, trace, at) in histogram.exemplars.items():
                lines[first + index] += f' # {{trace_id="{trace}"}} {number(value)} {number(at)}'
        lines.append(f"{name}_sum{braces(own)} {number(histogram.total)}")
        lines.append(f"{name}_count{braces(own)} {counts[-1]}")

    def _head(self, family: Family, lines: list[str]) -> str:
        """Announce a family; return the name that its samples have."""
        total = f"{family.name}_total" if family.kind == "counter" else family.name
        # The two formats name counters differently here, and alike in the samples.
        announced = family.name if self._openmetrics else total
        lines.append(f"# HELP {announced} {family.help}")
        lines.append(f"# TYPE {announced} {family.kind}")
        return total


def pairs(names: Sequence[str], values: Sequence[object]) -> str:
    """Write labels as they stand between the braces."""
    return ",".join(
        [f'{name}="{escape(str(value))}"' for name, value in zip(names, values, strict=True)]
    )


def braces(labels: str) -> str:
    """Put braces around labels, if there are any."""
    return f"{{{labels}}}" if labels else ""


@lru_cache(maxsize=8192)  # names of workers and models come again and again
def escape(value: str) -> str:
    """Escape what would end a label's value; what is no UTF-8 is replaced."""
    if value.isalnum():
        return value
    value = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value.encode(errors="replace").decode()


def number(value: float) -> str:
    """Write a number: whole ones without a point."""
    if isinstance(value, int):
        return str(int(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(value), text)
