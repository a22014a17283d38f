"""Aggregate figures of requests; each request is added once and dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import Trend
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch


@dataclass(slots=True)
class ClassFigures:
    arrived: int = 0
    ended: int = 0  # done or refused
    done: int = 0
    met: int = 0  # within the targets
    kept: int = 0  # within the targets or tolerably late, see `FlowFigures`
    handed_over: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)
    longest: QuantileSketch = field(default_factory=QuantileSketch)  # longest gap per request
    e2el: QuantileSketch = field(default_factory=QuantileSketch)

    @property
    def share(self) -> float:
        return self.met / self.arrived if self.arrived else 0.0

    @property
    def kept_share(self) -> float:
        return self.kept / self.arrived if self.arrived else 0.0

    def merge(self, other: ClassFigures) -> None:
        for figure in fields(self):
            ours, theirs = getattr(self, figure.name), getattr(other, figure.name)
            if isinstance(ours, QuantileSketch):
                ours.merge(theirs)
            else:
                setattr(self, figure.name, ours + theirs)


@dataclass(slots=True)
class FlowResult:
    all: ClassFigures
    classes: dict[str, ClassFigures]
    span_s: float  # of arrivals
    duration_s: float  # until the last end
    gaps: QuantileSketch  # between tokens
    growth: float = 0.0  # of the time to first token, seconds per second
    failed: bool = False  # stopped early because too many requests were late

    @property
    def refused(self) -> int:
        return self.all.ended - self.all.done

    @property
    def rate(self) -> float:
        return self.all.arrived / self.span_s if self.span_s else 0.0

    @property
    def goodput(self) -> float:
        return self.rate * self.all.share

    @property
    def throughput(self) -> float:
        figures = self.all
        return (figures.prompt_tokens + figures.output_tokens) / (self.duration_s or 1.0)


def merge_results(runs: Sequence[FlowResult]) -> FlowResult:
    """Return the sum of several runs of a fleet, with the worst queue growth."""
    whole, classes, gaps = ClassFigures(), dict[str, ClassFigures](), QuantileSketch()
    for run in runs:
        whole.merge(run.all)
        gaps.merge(run.gaps)
        for klass, figures in run.classes.items():
            classes.setdefault(klass, ClassFigures()).merge(figures)
    return FlowResult(
        whole,
        classes,
        span_s=sum(run.span_s for run in runs),
        duration_s=sum(run.duration_s for run in runs),
        gaps=gaps,
        growth=max((run.growth for run in runs), default=0.0),
        failed=any(run.failed for run in runs),
    )


class FlowFigures:
    """The figures of one run so far.

    `tolerated_ttft_s` returns the time to first token that a prompt length may take: a long prompt
    may exceed the target but must not starve.
    """

    def __init__(self, targets: Targets, tolerated_ttft_s: Callable[[int], float]) -> None:
        self.late = 0  # failed, or beyond the targets
        self.lost = Counter[str]()  # by class: also beyond `tolerated_ttft_s`
        self.classes: dict[str, ClassFigures] = {}
        self.trend = Trend()  # of the time to first token
        self._targets = targets
        self._tolerated_ttft_s = tolerated_ttft_s

    def record_arrival(self, klass: str) -> None:
        self._of_class(klass).arrived += 1

    def record_first_token(self, klass: str, prompt: int, ttft: float) -> None:
        if not self._targets.is_in_time(ttft, 0.0):
            self.late += 1
            self.lost[klass] += ttft > self._tolerated_ttft_s(prompt)

    def record_end(
        self, outcome: Outcome, klass: str, longest: float, *, handed_over: bool = False
    ) -> None:
        """Count a response; `longest` is its longest gap between tokens."""
        figures = self._of_class(klass)
        figures.ended += 1
        if not outcome.good:
            self.late += 1
            self.lost[klass] += 1
            return
        targets, output, tpot = self._targets, outcome.completed, outcome.tpot or 0.0
        ttft, latency = outcome.ttft, outcome.latency
        paced = targets.is_paced(tpot, longest)
        met = paced and targets.is_in_time(ttft, latency)
        tolerated = ttft <= self._tolerated_ttft_s(outcome.prompt_tokens)
        kept = met or (paced and tolerated)
        # A late first token has been counted.
        begun_in_time = targets.is_in_time(ttft, 0.0)
        self.late += begun_in_time and not met
        self.lost[klass] += (begun_in_time or tolerated) and not kept
        figures.done += 1
        figures.met += met
        figures.kept += kept
        figures.handed_over += handed_over
        figures.prompt_tokens += outcome.prompt_tokens
        figures.output_tokens += output
        figures.ttft.add(ttft)
        if targets.e2el is not None:
            figures.e2el.add(latency)
        if output > 1:
            figures.tpot.add(tpot)
            figures.longest.add(longest)

    def result(
        self, span_s: float, duration_s: float, gaps: QuantileSketch, *, failed: bool = False
    ) -> FlowResult:
        whole, growth = ClassFigures(), self.trend.growth
        for figures in self.classes.values():
            whole.merge(figures)
        return FlowResult(whole, self.classes, span_s, duration_s, gaps, growth, failed)

    def _of_class(self, klass: str) -> ClassFigures:
        figures = self.classes.get(klass)
        if figures is None:
            figures = self.classes[klass] = ClassFigures()
        return figures
