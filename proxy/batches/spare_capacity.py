"""Whether there is room that nobody else wants now.

A line is of the class that goes in the gaps, and would wait for one in the router's queue. It is
held back before that: what waits there takes memory and places from others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.learned.bytes_per_token import BYTES_PER_TOKEN
from proxy.core.model.types import RequestInfo
from proxy.core.routing.candidates import leaves_room, stops_decodes

if TYPE_CHECKING:
    from proxy.core.router import Router
    from proxy.core.tenants.tenants import Tenant

LEFT = 0.5  # of each of a tenant's limits, for what it asks itself
# The smallest there is: how large a line is will be known when it is read.
SMALLEST = RequestInfo("", "", "", 0, 0, 0, 0, 0)


def gap(router: Router, model: str, now: float, size: int = 0) -> bool:
    """Whether a model has a worker to spare, and nobody of it waits in the queue.

    What no worker is for may go as well, to be refused as any other such request, once nobody is
    waited for any more to say what it is for. `size`: the bytes of a line, of which only this is
    heeded, that a long one needs a prefill worker.
    """
    fleet = router.fleet
    known = fleet.models()
    if not known:
        return False
    if not model and len(known) == 1:
        model = known[0]
    if not fleet.serves(model):
        return fleet.all_told(model)
    if router.queue.has(model):
        return False
    fair, pool = router.settings.fairness, fleet.pool(model)
    free = [w for w in pool.all if w.takes(now) and leaves_room(w, SMALLEST, now, fair)]
    if not free or not pool.prefills:
        return bool(free)
    if any(p.takes(now) and leaves_room(p, SMALLEST, now, fair) for p in pool.prefills):
        return True
    return not all(stops_decodes(w, int(size / BYTES_PER_TOKEN), fair) for w in free)


def within_limits(tenant: Tenant, now: float) -> bool:
    """Whether a line would leave its tenant enough of its limits for people of its own."""
    ledger, most = tenant.ledger, tenant.spec.limits.concurrency
    if most is not None and ledger.running + ledger.elsewhere >= max(LEFT * most, 1):
        return False
    return all(state is None or state[1] > LEFT * state[0] for state in ledger.left(now))
