"""Comparisons of more than two ways to serve a workload: each against the first, in one table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.compare import Comparison
from vllm_sched.bench.results.summary import plain_table
from vllm_sched.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_sched.bench.compare.compare import ComparisonPlan, Contender

# Lines that are left out of the table: the same for every contender, or redundant.
HIDDEN_LINES = frozenset([("short", "tokens/s"), ("long", "tokens/s"), ("lone", "TTFT p99")])


@dataclass(frozen=True)
class Contest:
    """A finished contest; the others are compared with the first contender."""

    plan: ComparisonPlan
    contenders: Sequence[Contender]

    @property
    def pairs(self) -> list[Comparison]:
        """Comparisons of the first contender with each of the others."""
        first, *others = self.contenders
        first = replace(first, role="baseline")
        return [Comparison(self.plan, first, replace(each, role="candidate")) for each in others]

    @property
    def failed(self) -> bool:
        return any(each.failed for each in self.contenders)

    def warning(self) -> str:
        return next((said for pair in self.pairs if (said := pair.warning())), "")

    def table(self) -> Table:
        layout = plain_table(("", ""), (each.label for each in self.contenders))
        group = ""
        for lines in zip(*(pair.figures for pair in self.pairs), strict=True):
            line = lines[0]
            if (line.group, line.measure) in HIDDEN_LINES:
                continue
            if group and line.group != group:
                layout.add_section()
            layout.add_row(
                report.GROUPS[line.group] if line.group != group else "",
                line.measure,
                report.show(line.baseline, line.unit),
                *(_cell(each) for each in lines),
            )
            group = line.group
        if self.failed:
            layout.add_section()
            counts = (str(len(each.failed)) for each in self.contenders)
            layout.add_row("failed requests", "", *counts, style="bold red")
        return layout

    def to_json(self) -> dict[str, Any]:
        first, *others = self.pairs
        whole = first.to_json()
        sides, figures = {self.contenders[0].role: whole["sides"]["baseline"]}, {}
        for each, pair in zip(self.contenders[1:], (first, *others), strict=True):
            sides[each.role] = pair.to_json()["sides"]["candidate"]
            figures[each.role] = [asdict(figure) for figure in pair.figures]
        return {**whole, "warning": self.warning(), "sides": sides, "figures": figures}

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


def _cell(line: report.Figure) -> Text:
    value = f"{report.show(line.candidate, line.unit)} ({report.show_ratio(line.ratio)})"
    return Text(value, style=report.STYLES[line.better])
