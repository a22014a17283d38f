"""Short requests to short workers, long ones to long workers.

Idea: the token budget decides the pool (arXiv 2604.08075, 2604.09613), then the least load. General
workers are in both; the other pool is the last resort. Cost: one comparison per candidate.

How it fails: idle long workers stay idle while short ones are busy, and the reverse.
"""

from __future__ import annotations

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.routing.least_loaded import load
from proxy.core.routing.view import Rule, View, own_pool_is_full, reason_for, suits


class Length(Rule):
    name = "length"
    by_size = True

    def choose(self, view: View) -> Decision | None:
        long = view.info.long
        pool = [w for w in view.candidates if suits(w, long=long)]
        if not pool:
            if own_pool_is_full(view):
                return None
            pool = view.candidates
        worker = min(pool, key=load)
        return Decision(worker, reason_for(worker, view))

    def rank(self, worker: Worker) -> float:
        return worker.requests
