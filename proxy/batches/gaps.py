"""Whether there is room that nobody else wants now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.worker import NO_LIMIT

if TYPE_CHECKING:
    from proxy.core.router import Router
    from proxy.core.worker import Worker

SPARE = 0.5  # of a worker's room, that batches leave to others
MOST_UNKNOWN = 8  # requests on a worker that says nothing of its room


def gap(router: Router, model: str) -> bool:
    """Whether a model has a worker to spare, and nobody waits in the queue.

    What no worker is for may go as well, to be refused as any other such request.
    """
    fleet = router.fleet
    known = fleet.models()
    if router.queue.length or not known:
        return False
    if not model and len(known) == 1:
        model = known[0]
    return not fleet.serves(model) or any(map(spare, fleet.pool(model).all))


def spare(worker: Worker) -> bool:
    """Whether a worker has room that others are not likely to want."""
    gauges = worker.gauges
    if worker.shut or (gauges is not None and gauges.waiting):
        return False
    if worker.most is not NO_LIMIT:
        return worker.requests < max(SPARE * worker.most, 1)
    if worker.kv_capacity:
        return worker.kv_tokens < SPARE * worker.kv_capacity
    return worker.requests < MOST_UNKNOWN
