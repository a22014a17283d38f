"""The metrics of all processes together, of those that are late or no more too.

What the dead counted of workers that are gone as well is dropped once no process shows it: each pod
is a name of its own, and nobody else would ever forget it. Processes drop such series one by one,
each when it looks; until the last one has, what the others counted stays in the sum, or it would
fall.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.metrics.scrape import PROCESSES, RESTARTS
from proxy.processes import metrics_merge

if TYPE_CHECKING:
    from collections.abc import Mapping


class MetricsTotals:
    """What each process said last, and what it, or one that ended, said once and no more."""

    def __init__(self) -> None:
        self._pages: dict[int, metrics_merge.Page] = {}
        self._asked: dict[int, int] = {}  # the number of the question that each of these answers
        self._past: metrics_merge.Page = {}

    def gone(self, index: int) -> None:
        """Keep what a process had counted when it ended."""
        self._asked.pop(index, None)
        last = self._pages.pop(index, None)
        if last is not None:
            self._past = metrics_merge.add_up([self._past, metrics_merge.lasting(last)])

    def page(
        self,
        found: Mapping[int, str],
        *,
        number: int,
        serving: int,
        restarts: int,
        openmetrics: bool,
    ) -> tuple[bytes, str]:
        """Add up what those that are there say now, or said last where they did not answer.

        `number` grows with each question, as they may be answered in another order.
        """
        dropped = [
            self._told(index, number, metrics_merge.read(text)) for index, text in found.items()
        ]
        # The leader's first.
        order = [*found, *(index for index in self._pages if index not in found)]
        total = metrics_merge.add_up(self._pages[index] for index in order)
        if no_more := metrics_merge.add_up(dropped):
            self._past = metrics_merge.add_up([self._past, no_more])
            self._past = metrics_merge.less(self._past, metrics_merge.less(no_more, total))
        if self._past:
            self._past = metrics_merge.without_strangers(self._past, total)
            total = metrics_merge.add_up([total, self._past])
        for family, name, value in (
            (PROCESSES, PROCESSES.name, serving),
            (RESTARTS, f"{RESTARTS.name}_total", restarts),
        ):
            total[name] = metrics_merge.MergedFamily(family.kind, family.help, {name: value})
        return metrics_merge.write(total, openmetrics=openmetrics)

    def _told(self, index: int, number: int, page: metrics_merge.Page) -> metrics_merge.Page:
        """Take what a process says now; return what it has dropped, as far as that counts on."""
        if self._asked.get(index, 0) > number:
            return {}
        self._asked[index] = number
        before, self._pages[index] = self._pages.get(index), page
        return {} if before is None else metrics_merge.dropped(metrics_merge.lasting(before), page)
