"""The targets for hand-overs, and the figures of a run.

A long prompt that finds a worker without another long prefill measures prefill and transfer, from
arrival to first token. The times of all long prompts, which include waits, are listed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.compare import Comparison
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import BACKGROUND, LONG, SHORT
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile

MAX_LONG_RATIO = 1.15  # to a long prompt on a general worker
# Workers that prefill, on each side.
GENERAL, PREFILL = 2, 1
# Title, group, measure, maximum ratio.
TARGETS = (
    ("p99 between two tokens of a running decode", BACKGROUND, "ITL p99", 0.15),
    ("longest gap of a running decode", BACKGROUND, "ITL max", 0.15),
    ("longest gap, to the general workers'", BACKGROUND, "ITL max", 1.0),
    ("a long prompt, its wait for others included, p50", LONG, "TTFT p50", MAX_LONG_RATIO),
    ("a short prompt, to its first token, p50", SHORT, "TTFT p50", 1.0),
    ("a short prompt, to its first token, p99", SHORT, "TTFT p99", 1.0),
)


@dataclass(frozen=True)
class Verdict:
    """A target and the measured ratio."""

    what: str
    baseline: float | None
    candidate: float | None
    ratio: float | None
    at_most: float

    @property
    def kept(self) -> bool:
        """True if the ratio is within the target."""
        return self.ratio is not None and self.ratio <= self.at_most


def verdicts(result: Comparison) -> list[Verdict]:
    judged = []
    (lines,) = result.figures.values()
    for what, group, measure, at_most in TARGETS:
        line = report.figure(lines, group, measure)
        judged.append(Verdict(what, line.baseline, line.candidate, line.ratio, at_most))
        if group == LONG:
            judged += prefills(result)
    return judged


def prefills(result: Comparison) -> list[Verdict]:
    """Return the verdicts on long prompts that waited for no other: median and slowest."""
    theirs, ours = (
        unhindered(side.rounds, workers)
        for side, workers in zip(result.contenders, (GENERAL, PREFILL), strict=True)
    )
    what = f"long prompts that wait for no other ({len(theirs)}; {len(ours)})"
    baseline, candidate = percentile(theirs, 50), percentile(ours, 50)
    slowest = max(ours, default=None)
    return [
        Verdict(
            f"{what}, p50",
            baseline, candidate, report.ratio_of(candidate, baseline), MAX_LONG_RATIO,
        ),
        Verdict(
            "the slowest of them, to the general workers' p50",
            baseline, slowest, report.ratio_of(slowest, baseline), MAX_LONG_RATIO,
        ),
    ]  # fmt: skip


def unhindered(rounds: Sequence[Round], workers: int) -> list[float]:
    """Return times to first token of long prompts that found a worker without another one."""
    ttfts = []
    for played in rounds:
        longs = sorted(
            (record for record in played.records if record.klass == LONG),
            key=lambda record: record.sent,
        )
        for index, record in enumerate(longs):
            ahead = sum(_is_prefilled_at(record.sent, other) for other in longs[:index])
            if ahead < workers and record.ticks and not record.error:
                ttfts.append(record.ttft)
    return ttfts


def _is_prefilled_at(now: float, record: Outcome) -> bool:
    return record.first_token is None or record.first_token > now


def to_json(judged: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [{**asdict(verdict), "kept": verdict.kept} for verdict in judged]


def table(result: Comparison) -> Table:
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "",
        *(contender.label for contender in result.contenders),
        "ratio",
        "at most",
        "",
    ):
        layout.add_column(heading, justify="right" if heading else "left")
    for verdict in verdicts(result):
        layout.add_row(
            verdict.what,
            report.show(verdict.baseline, report.SECONDS),
            report.show(verdict.candidate, report.SECONDS),
            report.show_ratio(verdict.ratio),
            f"{verdict.at_most:g}x",
            "kept" if verdict.kept else "missed",
            style="green" if verdict.kept else "red",
        )
    return layout
