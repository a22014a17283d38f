"""Decides whether workers have capacity that no other request needs.

Queued lines would use memory and queue places that other requests need. So the scheduler holds
lines back until there is capacity.
"""

from __future__ import annotations

from proxy.core.learned.bytes_per_token import BYTES_PER_TOKEN
from proxy.core.model.types import RequestInfo
from proxy.core.router import Router
from proxy.core.routing.candidates import leaves_room, stops_decodes
from proxy.core.tenants.tenants import Tenant

RESERVED_SHARE = 0.5  # of each tenant limit, reserved for the tenant's other requests
# A minimal request: a line's size is known only once it is parsed.
MINIMAL_REQUEST = RequestInfo("", "", "", 0, 0, 0, 0, 0)


def has_spare_capacity(router: Router, model: str, now: float, size: int = 0) -> bool:
    """Return True if a worker for the model has spare capacity and no request for it is queued.

    Also True for a model that no worker serves, once all workers have listed their models, so that
    the router refuses the line. `size`, in bytes, only decides if a line needs a prefill worker.
    """
    fleet = router.fleet
    models = fleet.roster.models()
    if not models:
        return False
    if not model and len(models) == 1:
        model = models[0]
    if not fleet.roster.serves(model):
        return fleet.roster.all_listed(model)
    if router.queue.has_waiting_for(model):
        return False
    fair, pool = router.settings.fairness, fleet.roster.pool(model)
    free = [w for w in pool.all if w.accepts(now) and leaves_room(w, MINIMAL_REQUEST, now, fair)]
    if not free or not pool.prefills:
        return bool(free)
    if any(p.accepts(now) and leaves_room(p, MINIMAL_REQUEST, now, fair) for p in pool.prefills):
        return True
    return not all(stops_decodes(w, int(size / BYTES_PER_TOKEN), fair) for w in free)


def within_limits(tenant: Tenant, now: float) -> bool:
    """Return True if a line leaves the tenant enough of its limits for other requests."""
    ledger, max_concurrency = tenant.ledger, tenant.spec.limits.concurrency
    if max_concurrency is not None and ledger.running + ledger.running_elsewhere >= max(
        RESERVED_SHARE * max_concurrency, 1
    ):
        return False
    return all(
        state is None or state.remaining > RESERVED_SHARE * state.limit
        for state in ledger.remaining(now)
    )
