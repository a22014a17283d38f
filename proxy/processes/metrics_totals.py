"""The metrics of all processes together, including late and exited processes.

Exited processes' counters about removed workers are dropped once no running process shows the
worker: each pod has a new name. Until the last process drops a series, its full value stays,
because the sum must not decrease.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.metrics.page import PROCESSES, RESTARTS
from proxy.metrics.replica_counts import ALONE, ReplicaCounts
from proxy.processes import metrics_merge


class MetricsTotals:
    """The last page of each process, and exited processes' counters."""

    def __init__(self) -> None:
        self._pages: dict[int, metrics_merge.Page] = {}
        self._question_of: dict[int, int] = {}  # question number of each page
        self._exited: metrics_merge.Page = {}

    def keep_counters(self, index: int) -> None:
        """Keep the final counters of an exited process."""
        self._question_of.pop(index, None)
        last = self._pages.pop(index, None)
        if last is not None:
            self._exited = metrics_merge.add_up([self._exited, metrics_merge.own_counts(last)])

    def merge(
        self,
        pages: Mapping[int, str],
        *,
        number: int,
        serving: int,
        restarts: int,
        replicas: ReplicaCounts = ALONE,
        openmetrics: bool,
    ) -> tuple[bytes, str]:
        """Return the merged page; late processes count with their last page.

        `number` grows with each question; answers may arrive out of order.
        """
        lost_by_process = [
            self._store(index, number, metrics_merge.read(text)) for index, text in pages.items()
        ]
        # The leader's page comes first.
        order = [*pages, *(index for index in self._pages if index not in pages)]
        total = metrics_merge.add_up(self._pages[index] for index in order)
        if lost := metrics_merge.add_up(lost_by_process):
            self._exited = metrics_merge.add_up([self._exited, lost])
            self._exited = metrics_merge.series_missing_in(
                self._exited, metrics_merge.series_missing_in(lost, total)
            )
        if self._exited:
            self._exited = metrics_merge.without_removed_workers(self._exited, total)
            total = metrics_merge.add_up([total, self._exited])
        own = [(PROCESSES, float(serving)), (RESTARTS, float(restarts)), *replicas.rows()]
        for family, value in own:
            name = family.sample_name
            total[name] = metrics_merge.MergedFamily(family.kind, family.help, {name: value})
        return metrics_merge.write(total, openmetrics=openmetrics)

    def _store(self, index: int, number: int, page: metrics_merge.Page) -> metrics_merge.Page:
        """Store a process's page; return the counters that it dropped."""
        if self._question_of.get(index, 0) > number:
            return {}
        self._question_of[index] = number
        before, self._pages[index] = self._pages.get(index), page
        if before is None:
            return {}
        return metrics_merge.lost_counts(metrics_merge.own_counts(before), page)
