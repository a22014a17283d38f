"""Each worker in turn.

Idea: whoever was given a request longest ago is next, which also gives a worker that was away no
flood when it returns. Cost: one comparison per candidate. How it fails: it sees neither size nor
load, so a short prompt waits behind a long one as often as not. It is here to be compared with.
"""

from __future__ import annotations

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.routing.view import Rule, View


class RoundRobin(Rule):
    """See the module's text."""

    name = "round_robin"

    def choose(self, view: View) -> Decision | None:
        """Choose whose turn it is."""
        return Decision(min(view.candidates, key=self.rank), Reason.ROUND_ROBIN)

    def rank(self, worker: Worker) -> float:
        """Whose turn was longest ago."""
        return worker.served
