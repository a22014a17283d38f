"""Compute figures from windows, and print them beside their targets.

A side's figure is the median of its rounds; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.router.measure import (
    CHUNKS,
    LOADS,
    MANY_STREAMS,
    ONE_BY_ONE,
    Paced,
    Results,
    Sample,
)
from benchmarks.router.opponents import VLLM_ROUTER
from benchmarks.router.stage import DIRECT, OURS

RIVAL = VLLM_ROUTER.name
MICRO, MILLI, MEGA = 1e6, 1e3, 1e-6

# A sample and the samples of all sides in the same round.
Measure = Callable[[Sample, Mapping[str, Sample]], float | None]


@dataclass(frozen=True)
class Target:
    """A limit for our router: a value, or a multiple of the rival's value."""

    limit: float
    relative: bool = True
    at_least: bool = False

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.limit:g}" + (f"x {RIVAL}" if self.relative else "")

    def met_by(self, value: float) -> bool:
        """Return whether a value or ratio is within the limit."""
        reaches = operator.ge if self.at_least else operator.le
        return bool(reaches(value, self.limit))


NO_MORE = Target(1.0)


@dataclass(frozen=True)
class Figure:
    title: str
    unit: str
    values: dict[str, float]  # by side
    ratio: float | None = None  # ours over the rival's
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target or a value."""
        if self.target is None:
            return None
        value = self.ratio if self.target.relative else self.values.get(OURS)
        return None if value is None else self.target.met_by(value)


@dataclass(frozen=True)
class Line:
    """The definition of a figure."""

    load: str
    title: str
    unit: str
    measure: Measure
    target: Target | None = None


def cpu_per_request(sample: Sample, _: Mapping[str, Sample]) -> float | None:
    """Return the router's CPU microseconds per answer."""
    routed = sample.done and sample.side != DIRECT
    return sample.cpu_s / sample.done * MICRO if routed else None


def cpu_per_chunk(sample: Sample, _: Mapping[str, Sample]) -> float | None:
    """Return the router's CPU microseconds per stream event."""
    return sample.cpu_s / sample.events * MICRO if sample.events else None


def rate(sample: Sample, _: Mapping[str, Sample]) -> float | None:
    return sample.done / sample.seconds


def added(percent: int) -> Measure:
    """Return a measure: milliseconds that a router adds to a percentile of the bare worker."""

    def measure(sample: Sample, others: Mapping[str, Sample]) -> float | None:
        alone = others.get(DIRECT)
        if alone is None or sample is alone:
            return None
        routed, bare = (s.p50_s if percent == 50 else s.p99_s for s in (sample, alone))
        return None if routed is None or bare is None else (routed - bare) * MILLI

    return measure


def latency(sample: Sample, _: Mapping[str, Sample]) -> float | None:
    return None if sample.p50_s is None else sample.p50_s * MILLI


def failed_streams(sample: Sample, _: Mapping[str, Sample]) -> float:
    """Return the streams that failed or were never open beside all others."""
    load = LOADS[sample.load]
    missing = load.streams - sample.most_open if isinstance(load, Paced) else 0
    return max(missing, sum(sample.errors.values()))


LINES = (
    Line("1kb-c32", "CPU per request, 1 KB, c=32", "us", cpu_per_request, Target(0.6)),
    Line("1kb-c256", "CPU per request, 1 KB, c=256", "us", cpu_per_request, Target(0.6)),
    Line("100kb-c32", "CPU per request, 100 KB, c=32", "us", cpu_per_request, NO_MORE),
    Line("100kb-c256", "CPU per request, 100 KB, c=256", "us", cpu_per_request, NO_MORE),
    Line("400kb-c8", "CPU per request, 400 KB, c=8", "us", cpu_per_request, Target(0.5)),
    Line("1mb-c8", "CPU per request, 1 MB, c=8", "us", cpu_per_request, Target(0.5)),
    Line("3mb-c8", "CPU per request, 3 MB, c=8", "us", cpu_per_request, Target(0.5)),
    Line("1kb-c32", "requests/s, 1 KB, c=32", "1/s", rate, Target(1.3, at_least=True)),
    Line("1kb-c256", "requests/s, 1 KB, c=256", "1/s", rate),
    Line("100kb-c32", "requests/s, 100 KB, c=32", "1/s", rate),
    Line("100kb-c256", "requests/s, 100 KB, c=256", "1/s", rate),
    Line(ONE_BY_ONE, "latency p50, c=1", "ms", latency),
    Line(ONE_BY_ONE, "added p50, c=1", "ms", added(50), NO_MORE),
    Line(ONE_BY_ONE, "added p99, c=1", "ms", added(99)),
    Line(CHUNKS, "CPU per chunk, 64 streams", "us", cpu_per_chunk, NO_MORE),
    Line(MANY_STREAMS, "CPU per chunk, 2,000 streams", "us", cpu_per_chunk),
    Line(MANY_STREAMS, "2,000 streams: failed", "", failed_streams, Target(0, relative=False)),
    Line("pd-1kb-c32", "P/D: CPU per request, 1 KB, c=32", "us", cpu_per_request, Target(0.66)),
    Line("pd-1kb-c32", "P/D: requests/s, 1 KB, c=32", "1/s", rate, Target(1.5, at_least=True)),
    Line("pd-100kb-c32", "P/D: CPU per request, 100 KB, c=32", "us", cpu_per_request, Target(0.66)),
    Line("pd-100kb-c32", "P/D: requests/s, 100 KB, c=32", "1/s", rate, Target(1.5, at_least=True)),
    Line("pd-chunks", "P/D: CPU per chunk, 64 streams", "us", cpu_per_chunk),
)


def figures(results: Results, decision_us: float | None) -> list[Figure]:
    """Return all measured figures, in the order of the table."""
    measured = {sample.load for sample in results.samples}
    all_figures = [_figure(line, results.samples) for line in LINES if line.load in measured]
    if results.memory:
        rss, pss = (
            {side: getattr(held, part) * MEGA for side, held in results.memory.items()}
            for part in ("rss", "pss")
        )
        all_figures.append(
            Figure("resident after load", "MB", rss, target=Target(120, relative=False))
        )
        all_figures.append(Figure("its proportional share", "MB", pss))
    if decision_us is not None:
        title, limit = "a decision, 1,000 workers", Target(50, relative=False)
        all_figures.append(Figure(title, "us", {OURS: decision_us}, target=limit))
    return all_figures


def _figure(line: Line, samples: Iterable[Sample]) -> Figure:
    rounds: dict[int, dict[str, Sample]] = {}
    for sample in samples:
        if sample.load == line.load:
            rounds.setdefault(sample.round, {})[sample.side] = sample
    values: dict[str, list[float]] = {}
    ratios = []
    for together in rounds.values():
        measured = {
            side: value
            for side, sample in together.items()
            if (value := line.measure(sample, together)) is not None
        }
        for side, value in measured.items():
            values.setdefault(side, []).append(value)
        if OURS in measured and measured.get(RIVAL, 0.0) > 0:
            ratios.append(measured[OURS] / measured[RIVAL])
    medians = {side: statistics.median(samples) for side, samples in values.items()}
    ratio = statistics.median(ratios) if ratios else None
    return Figure(line.title, line.unit, medians, ratio, line.target)


def errors(samples: Iterable[Sample]) -> dict[str, Counter[str]]:
    """Count the errors of each side, by load and kind."""
    by_side: dict[str, Counter[str]] = {}
    for sample in samples:
        for kind, count in sample.errors.items():
            by_side.setdefault(sample.side, Counter())[f"{sample.load}: {kind}"] += count
    return by_side


def show(value: float | None) -> str:
    """Format with three significant digits, and large values without decimals."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def table(lines: Sequence[Figure], sides: Sequence[str], title: str) -> Table:
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    layout.add_column("", no_wrap=True)
    for heading in ("", *sides, f"ours / {RIVAL}"):
        layout.add_column(heading, justify="right", min_width=min(len(heading), 11))
    layout.add_column("target", no_wrap=True)
    layout.add_column("")
    for line in lines:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[line.met]
        if line.target and line.met is None:
            verdict = "not measured"
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}x"
        layout.add_row(
            line.title, line.unit, *(show(line.values.get(side)) for side in sides),
            ratio, str(line.target or ""), verdict,
        )  # fmt: skip
    return layout
