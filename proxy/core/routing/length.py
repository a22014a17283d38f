"""Shorts to short workers, longs to long ones, whatever the load.

Idea: total token budget decides the pool (arXiv 2604.08075 and 2604.09613); within it the least
loaded worker. General workers belong to both pools. Only when a pool has nobody left does a
request go to the other. Cost: one comparison per candidate. How it fails: while no longs are about
their workers idle, and when many are, they queue beside idle short ones.
"""

from __future__ import annotations

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.routing.least_loaded import load
from proxy.core.routing.view import Rule, View, own_pool_is_full, reason_for, suits


class Length(Rule):
    """See the module's text."""

    name = "length"
    by_size = True

    def choose(self, view: View) -> Decision | None:
        """Choose the least loaded of the pool."""
        long = view.ask.long
        pool = [w for w in view.candidates if suits(w, long=long)]
        if not pool:
            if own_pool_is_full(view):
                return None
            pool = view.candidates
        worker = min(pool, key=load)
        return Decision(worker, reason_for(worker, view))

    def rank(self, worker: Worker) -> float:
        """Count its requests."""
        return worker.requests
