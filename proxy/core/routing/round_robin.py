"""Each worker in turn.

Idea: the worker not used for longest is next; a returning worker gets no flood. Cost: one
comparison per candidate. How it fails: it ignores size and load. It is a baseline.
"""

from __future__ import annotations

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.routing.view import Rule, View


class RoundRobin(Rule):
    name = "round_robin"

    def choose(self, view: View) -> Decision | None:
        return Decision(min(view.candidates, key=self.rank), Reason.ROUND_ROBIN)

    def rank(self, worker: Worker) -> float:
        return worker.last_used
