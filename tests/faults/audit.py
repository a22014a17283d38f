"""What must hold of an idle router after load."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import RequestInfo
from proxy.core.queue.ticket import Ticket
from proxy.http.request import Request
from proxy.setup.app import App
from proxy.wire import extension
from proxy.wire.client.connection import ClientConnection
from proxy.wire.exchange.exchange import Exchange
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.handover.release import BlockRelease
from proxy.wire.worker.connection import WorkerConnection

# Created per request or connection. Idle worker connections stay, each with a cached head.
TRANSIENT = (
    RequestInfo,
    Lease,
    Ticket,
    ClientConnection,
    TokenizeRequest,
    Exchange,
    BlockRelease,
    Request,
)


def unfinished(app: App, ever: Iterable[Worker] = ()) -> str:
    """Return what is still in flight or charged; empty if nothing is."""
    wire, router = app.wire, app.router
    busy = [count for count in wire.pools.counts() if count[1] == "busy" and count[2] > 0]
    left = {
        "exchanges": len(wire.exchanges),
        "queued": len(wire.queued) + len(router.queue),
        "queued bytes": router.queue.bytes,
        "counts of tokens": len(wire.short_waits),
        "releases": len(wire.releases),
        "local_requests": len(wire.local_requests),
        "bytes of bodies": wire.body_budget.held,
        "answers expected": len(app.fleet._silent),
        "clients": len(wire.clients),
        "tenants": {t.name: t.ledger.running for t in router.tenants if t.ledger.running},
        "tenants that wait": {t.name: t.waiting for t in router.tenants if t.waiting},
        "busy connections": busy,
        "charges": {w.name: c for w in {*app.fleet.roster, *ever} if any(c := charges(w))},
    }
    return ", ".join(f"{name}: {value}" for name, value in left.items() if value)


def charges(worker: Worker) -> tuple[int, ...]:
    return (
        worker.requests,
        worker.prefill_tokens,
        worker.decode_tokens,
        worker.kv_tokens,
        worker.num_decoding,
    )


def objects() -> Counter[str]:
    """Count the objects that should end with their request, and worker connections."""
    gc.collect()
    kinds = (*TRANSIENT, WorkerConnection)
    return Counter(type(item).__name__ for item in gc.get_objects() if type(item) in kinds)


def requests_by_status(app: App, without: str = "") -> Counter[int]:
    """Return the router's counts of requests by status, without one tenant's."""
    found: Counter[int] = Counter()
    for key, series in app.metrics.requests.items():
        if key[0] not in extension.BATCH_ROUTES:
            found[key[5]] += series.count
    for (tenant, _, status), count in app.metrics.tenants._requests.items():
        if tenant == without:
            found[status] -= count
    return +found
