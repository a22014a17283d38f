"""Retry of requests on workers that are down.

After a grace period the requests of such a worker are retried. A request that no other worker
accepts keeps waiting: the probes may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.core.fleet.worker import Worker
from proxy.wire.context import ServedExchange

# Counted from the failed probes.
DOWN_GRACE_S = 10.0


class Failover:
    def __init__(self) -> None:
        self._since: dict[Worker, float] = {}

    def retry_overdue(
        self, now: float, workers: Iterable[Worker], exchanges: Iterable[ServedExchange]
    ) -> None:
        """Retry requests after the grace period.

        Cost: O(workers), plus O(exchanges) while a worker is overdue.
        """
        before = self._since
        self._since = {w: before.get(w, now) for w in workers if not w.up and w.requests}
        overdue = {w for w, since in self._since.items() if now - since >= DOWN_GRACE_S}
        if overdue:
            for exchange in list(exchanges):
                exchange.leave_workers(now, overdue)
