"""Requests on workers that are down, of whose answers nothing has come.

A worker that takes no more probes may hang, and its requests would wait for as long as an answer
may take at most. So after a while they are failures, and go to others as those do. Where nobody
else would take one it waits on: that a worker is down may be a mistake of the probes, or of the
network between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.wire.context import ServedExchange

# Beyond the seconds that it takes to be called down. It may come up again meanwhile.
GRACE_S = 10.0


class Failover:
    """The workers that are down while requests wait on them."""

    def __init__(self) -> None:
        self._since: dict[Worker, float] = {}

    def look(
        self, now: float, workers: Iterable[Worker], exchanges: Iterable[ServedExchange]
    ) -> None:
        """See whom to wait for no longer.

        Cost: a look at each worker, and while one is overdue at each request that is under way.
        """
        before = self._since
        self._since = {w: before.get(w, now) for w in workers if not w.up and w.requests}
        overdue = {w for w, since in self._since.items() if now - since >= GRACE_S}
        if overdue:
            for exchange in list(exchanges):
                exchange.forsake(now, overdue)
