"""What was promised of a hand-over, and what this run shows."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table

from vllm_sched.bench import report
from vllm_sched.bench.compare import Comparison
from vllm_sched.bench.workloads import BACKGROUND, LONG, SHORT

EACH_LONG = 1.15  # times what one takes on a general worker
# (what, group, measure, at most)
PROMISED = (
    ("p99 between two tokens of a running decode", BACKGROUND, "ITL p99", 0.15),
    ("longest gap of a running decode", BACKGROUND, "ITL max", 1.0),
    ("a 12,000-token prompt, to its first token, p50", LONG, "TTFT p50", EACH_LONG),
    ("a short prompt, to its first token, p50", SHORT, "TTFT p50", 1.0),
    ("a short prompt, to its first token, p99", SHORT, "TTFT p99", 1.0),
)


@dataclass(frozen=True)
class Verdict:
    """One promise beside what was measured."""

    what: str
    baseline: float | None
    candidate: float | None
    ratio: float | None
    at_most: float

    @property
    def kept(self) -> bool:
        """Whether it holds."""
        return self.ratio is not None and self.ratio <= self.at_most


def verdicts(result: Comparison) -> list[Verdict]:
    """Judge a run."""
    found = []
    for what, group, measure, at_most in PROMISED:
        line = report.figure(result.figures, group, measure)
        found.append(Verdict(what, line.baseline, line.candidate, line.ratio, at_most))
        if group == LONG:
            found.append(slowest(result))
    return found


def slowest(result: Comparison) -> Verdict:
    """Judge each of the long prompts: the slowest of them by the median on general workers."""
    theirs, ours = (report.ttfts(side.rounds, LONG) for side in result.sides)
    median, most = report.percentile(theirs, 50), max(ours, default=None)
    ratio = most / median if most is not None and median else None
    what = "the slowest of them, beside the general workers' median"
    return Verdict(what, median, most, ratio, EACH_LONG)


def table(result: Comparison) -> Table:
    """Lay it out."""
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", *(each.label for each in result.sides), "ratio", "at most", ""):
        layout.add_column(heading, justify="right" if heading else "left")
    for each in verdicts(result):
        layout.add_row(
            each.what,
            report.show(each.baseline, report.SECONDS),
            report.show(each.candidate, report.SECONDS),
            report.show_ratio(each.ratio),
            f"{each.at_most:g}x",
            "kept" if each.kept else "missed",
            style="green" if each.kept else "red",
        )
    return layout
