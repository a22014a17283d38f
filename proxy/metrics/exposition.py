"""Metrics as text, in Prometheus's format and in OpenMetrics.

Streams wait while a page is written. This writer takes 1 to 3 us per line, a library 10. It yields
slices, between which streams continue: a thousand workers have tens of thousands of lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from proxy.metrics.histogram import Histogram

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OTHER = "other"  # label for everything without a series of its own
SLICE_LINES = 500  # lines per slice; a histogram is never split


class Family(NamedTuple):
    """A metric: its name, type, help text and label names."""

    name: str  # without `_total` for counters
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def sample_name(self) -> str:
        """The name of its samples, but for the endings of a histogram."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "counter", text, labels)


def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "gauge", text, labels)


def histogram(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "histogram", text, labels)


class MetricsPage:
    """One response to a scrape: values are added, then it is written."""

    def __init__(self, *, openmetrics: bool) -> None:
        self.kind = OPENMETRICS if openmetrics else TEXT
        self._openmetrics = openmetrics
        self._families: list[tuple[Family, list[tuple[Sequence[object], float | Histogram]]]] = []

    def values(self, family: Family, rows: Iterable[tuple[Sequence[object], float]]) -> None:
        """Add a counter or a gauge: label values and the number of each series."""
        self._families.append((family, [*rows]))

    def histograms(
        self, family: Family, rows: Iterable[tuple[Sequence[object], Histogram]]
    ) -> None:
        """Add a histogram: label values and the counts of each series."""
        self._families.append((family, [*rows]))

    def slices(self) -> Iterator[bytes]:
        """Yield the page in pieces; the caller may do other work between them."""
        lines: list[str] = []
        for family, rows in self._families:
            name = self._head(family, lines)
            for labels, value in rows:
                own = pairs(family.labels, labels)
                if isinstance(value, Histogram):
                    self._histogram(name, own, value, lines)
                else:
                    lines.append(f"{name}{braces(own)} {number(value)}")
                if len(lines) >= SLICE_LINES:
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
        total = family.sample_name
        # OpenMetrics headers omit a counter's `_total`; samples have it in both formats.
        announced = family.name if self._openmetrics else total
        lines.append(f"# HELP {announced} {family.help}")
        lines.append(f"# TYPE {announced} {family.kind}")
        return total


def pairs(names: Sequence[str], values: Sequence[object]) -> str:
    return ",".join(
        [f'{name}="{escape(str(value))}"' for name, value in zip(names, values, strict=True)]
    )


def braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


@lru_cache(maxsize=8192)  # worker and model names repeat
def escape(value: str) -> str:
    """Escape a label value; replace what is not valid UTF-8."""
    if value.isalnum():
        return value
    value = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value.encode(errors="replace").decode()


def number(value: float) -> str:
    """Format a number; whole numbers have no decimal point."""
    if isinstance(value, int):
        return str(int(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(value), text)
