"""The points, curves and knees of a sweep: workloads at several loads with several seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from vllm_sched.bench.plots.curves import Curve
from vllm_sched.bench.results.knee import served_rate, throughput_knee
from vllm_sched.bench.results.stats import interval
from vllm_sched.bench.results.summary import milliseconds, plain_table

RATE: Final = "request_rate"
CONCURRENCY: Final = "max_concurrency"


@dataclass(frozen=True)
class Point:
    """One run with a load and a seed: vLLM's figures for all requests."""

    workload: str
    axis: str
    load: float
    seed: int
    figures: Mapping[str, Any]
    kept_up: float = 1.0  # share of the rate that was served

    @property
    def share(self) -> float:
        """The share of requests that met the targets, or without targets, that did not fail."""
        if self.figures["goodput_share"] is not None:
            return float(self.figures["goodput_share"])
        ended = self.figures["completed"] + self.figures["failed"]
        # Without targets, requests that pile up in a queue count as not served.
        return float(self.kept_up * self.figures["completed"] / ended) if ended else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second in time, from the offered rate: a slow end does not count."""
        return self.share * self.load

    @property
    def tokens(self) -> float:
        return float(self.figures["total_token_throughput"])

    @property
    def ttft_p99_ms(self) -> float:
        """The 99th percentile of TTFT; NaN if no request was served."""
        ttft = self.figures["p99_ttft_ms"]
        return float("nan") if ttft is None else float(ttft)


@dataclass
class Sweep:
    points: list[Point] = field(default_factory=list)

    def runs(self, axis: str) -> dict[str, dict[float, list[Point]]]:
        """Return the points by workload, in the order of play, and by load."""
        runs: dict[str, dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
        for point in self.points:
            if point.axis == axis:
                runs[point.workload][point.load].append(point)
        return runs

    def figures(self, axis: str, measure: str) -> dict[str, dict[float, list[float]]]:
        return {
            name: {load: [getattr(run, measure) for run in runs] for load, runs in loads.items()}
            for name, loads in self.runs(axis).items()
        }

    def curves(self, axis: str, measure: str) -> dict[str, Curve]:
        knees = self.knees(axis)
        figures = self.figures(axis, measure)
        return {name: Curve(points, knees[name]) for name, points in figures.items()}

    def knees(self, axis: str) -> dict[str, float | None]:
        """Return each workload's knee: the highest served rate, or where throughput levels off."""
        measure, knee = ("share", served_rate) if axis == RATE else ("tokens", throughput_knee)
        return {
            name: knee({load: fmean(values) for load, values in loads.items()})
            for name, loads in self.figures(axis, measure).items()
        }

    def table(self, *, targets: bool) -> Table:
        heads = ("load", "in time" if targets else "kept up", "TTFT p99", "ITL p99", "tokens/s")
        layout = plain_table([""], heads, long_texts=True)
        for axis, unit in ((RATE, "/s"), (CONCURRENCY, " at once")):
            knees = self.knees(axis)
            for name, loads in self.runs(axis).items():
                for load, runs in sorted(loads.items()):
                    layout.add_row(
                        name,
                        f"{load:g}{unit}",
                        _percent([run.share for run in runs]),
                        milliseconds(_mean(run.figures["p99_ttft_ms"] for run in runs)),
                        milliseconds(_mean(run.figures["p99_itl_ms"] for run in runs)),
                        _with_interval([run.tokens for run in runs]),
                        style="bold" if load == knees[name] else "",
                        end_section=load == max(loads),
                    )
        return layout

    def to_json(self) -> dict[str, Any]:
        return {
            "points": [
                {
                    "workload": point.workload,
                    point.axis: point.load,
                    "seed": point.seed,
                    "share_in_time": point.share,
                    **point.figures,
                }
                for point in self.points
            ],
            "served_request_rate": self.knees(RATE),
            "knee_concurrency": self.knees(CONCURRENCY),
        }


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _percent(shares: Sequence[float]) -> str:
    mean, half = interval(shares)
    return f"{mean:.0%}" + (f" ± {min(100, 100 * half):.0f}" if half >= 0.005 else "")


def _with_interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:,.0f}" + (f" ± {half:,.0f}" if half else "")
