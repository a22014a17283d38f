"""The worker with the fewest requests.

Idea: requests in flight stand for load; of equals, the one with fewer tokens to prefill, then whose
turn it is. Cost: one comparison per candidate. How it fails: it takes a prompt of 30k tokens and
one of 30 for the same, so shorts share a worker with longs whenever the counts say so.
"""

from __future__ import annotations

from operator import attrgetter

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.routing.view import Rule, View

load = attrgetter("requests", "prefill_tokens", "served")


class LeastLoaded(Rule):
    """See the module's text."""

    name = "least_loaded"

    def choose(self, view: View) -> Decision | None:
        """Choose the least loaded."""
        return Decision(min(view.candidates, key=load), Reason.LEAST_LOADED)

    def rank(self, worker: Worker) -> float:
        """Count its requests."""
        return worker.requests
