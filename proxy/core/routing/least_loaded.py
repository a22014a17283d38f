"""The worker with the fewest requests.

Idea: requests measure load; ties go to fewer prefill tokens, then turn. Cost: one comparison per
candidate. How it fails: long and short prompts count the same.
"""

from __future__ import annotations

from operator import attrgetter

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.routing.view import Rule, View

load = attrgetter("requests", "prefill_tokens", "last_used")


class LeastLoaded(Rule):
    name = "least_loaded"

    def choose(self, view: View) -> Decision | None:
        return Decision(min(view.candidates, key=load), Reason.LEAST_LOADED)

    def rank(self, worker: Worker) -> float:
        return worker.requests
