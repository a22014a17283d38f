"""Fleets, routers and requests for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from proxy.core.fleet.charges import Fleet, idle_fleet
from proxy.core.fleet.ejection import PoolKey
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.roster import time_zero
from proxy.core.fleet.worker import Worker
from proxy.core.learned.prefix_index import COVERED
from proxy.core.model.role import Role
from proxy.core.model.route_table import Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, ReceivedRequest, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.request.route_lookup import find
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present

MODEL = "m"
SHORT, LONG, GENERAL = Role.SHORT, Role.LONG, Role.GENERAL
_ids = count()


def spec(
    name: str,
    role: Role = GENERAL,
    limit: int | None = None,
    most: int | None = None,
    model: str = MODEL,
) -> WorkerSpec:
    return WorkerSpec(name, f"http://{name}", role, model, limit, most)


def fleet_of(*specs: WorkerSpec, clock: Callable[[], float] = time_zero) -> Fleet:
    """Make a fleet whose workers are all up."""
    return idle_fleet(specs, clock)


def router_of(*specs: WorkerSpec, **settings: Any) -> Router:
    """Make a router for a fleet whose workers are all up."""
    return Router(RouterSettings(**settings), fleet_of(*specs))


def members(fleet: Fleet) -> list[Worker]:
    return list(fleet.roster)


def worker_of(router: Router, name: str) -> Worker:
    return present(router.fleet.roster.get(name))


def take_down(fleet: Fleet, *names: str) -> None:
    """Fail probes of workers until they count as down."""
    for name in names:
        for _ in range(fleet.health.down_after):
            fleet.health.probe_failed(name)


class BreakerRecorder:
    """Records what a fleet reports of its breakers and its panics."""

    def __init__(self, fleet: Fleet) -> None:
        self.events: list[tuple[object, ...]] = []
        fleet.roster.ejections.listener = self

    def breaker_opened(self, worker: Worker, now: float) -> None:
        self.events.append(("rests", worker.name, f"{worker.breaker.why} at {now:g}"))

    def breaker_stayed_open(self, worker: Worker, now: float) -> None:
        """Ignore the event."""

    def breaker_closed(self, worker: Worker) -> None:
        self.events.append(("is back", worker.name))

    def panic_started(self, key: PoolKey, live: int, failed: int, now: float) -> None:  # noqa: ARG002
        self.events.append(("panics", key, live, failed))

    def panic_ended(self, key: PoolKey, live: int, failed: int) -> None:
        self.events.append(("heeds", key, live, failed))

    def worker_removed(self, worker: Worker) -> None:
        """Ignore the event."""


def tenant(
    name: str = "t", rank: Rank = Rank.STANDARD, weight: float = 1.0, **limits: int
) -> Tenant:
    return Tenant(TenantSpec(name, rank, weight, Limits(**limits)))


def make_info(
    prompt: int = 100,
    output: int | None = 50,
    *,
    long: bool = False,
    error: int = 0,
    samples: int = 1,
    stream: bool = True,
    generates: bool = True,
    size: int | None = None,
    prefix: tuple[int, ...] = (),
    model: str = MODEL,
) -> RequestInfo:
    info = RequestInfo(
        f"r{next(_ids)}",
        "chat/completions",
        model,
        prompt * 4 if size is None else size,
        prompt,
        error,
        prompt,
        output,
        expected_output=50 if output is None else output,
        generates=generates,
        stream=stream,
        samples=samples,
        counted=not error,
        long=long,
        prefix=prefix,
    )
    info.prefix_bytes = max(prompt * 4, COVERED[len(prefix)])
    return info


def info_of(
    owner: Tenant | None, prompt: int = 100, output: int | None = 50, **fields: Any
) -> RequestInfo:
    """Return a request of a tenant."""
    info = make_info(prompt, output, **fields)
    if owner is not None:
        info.tenant, info.rank = owner, owner.spec.rank
    return info


def pinned_to(name: str, prompt: int = 100) -> RequestInfo:
    info = make_info(prompt)
    info.pinned = name
    return info


def route(path: str = "/v1/chat/completions", method: str = "POST") -> Route:
    found = find(method, path)
    assert isinstance(found, Route)
    return found


def read(
    router: Router,
    body: dict[str, Any] | bytes,
    path: str = "/v1/chat/completions",
    owner: Tenant | None = None,
    **fields: Any,
) -> RequestInfo | Refusal:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return router.read(
        ReceivedRequest(route(path), raw, b"application/json", "id", owner, **fields)
    )


def sized(
    router: Router,
    body: dict[str, Any] | bytes,
    path: str = "/v1/chat/completions",
    owner: Tenant | None = None,
    **fields: Any,
) -> RequestInfo:
    """Read a valid body."""
    found = read(router, body, path, owner, **fields)
    assert isinstance(found, RequestInfo), found
    return found


def chat(*contents: object, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **fields}


def placed(answer: Lease | Ticket | Refusal) -> Lease:
    assert isinstance(answer, Lease), answer
    return answer


def waits(answer: Lease | Ticket | Refusal) -> Ticket:
    assert isinstance(answer, Ticket), answer
    return answer


def serve(router: Router, info: RequestInfo, now: float = 0.0, usage: Usage | None = None) -> Lease:
    """Place a request and end it at once."""
    lease = placed(router.submit(info, now))
    router.leases.finish(lease, now, Outcome.DONE, usage)
    return lease


def pop_one(router: Router, now: float) -> tuple[Ticket, Lease | Refusal]:
    """Return the only ticket that ends now, and its end."""
    [(ticket, end)] = router.pop_due(now)
    return ticket, end


def notes(router: Router, info: RequestInfo, now: float) -> dict[str, str]:
    """Return the note on each worker in the explanation of a decision."""
    return {score.worker: score.note for score in router.placer.explain(info, now).scores}


def workers_named(router: Router, *names: str) -> frozenset[Worker]:
    return frozenset(worker_of(router, name) for name in names)


def refused(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


def idle(workers: Iterable[Worker]) -> bool:
    """Return whether nothing is charged to any of the workers."""
    return all(
        not any((w.requests, w.sequences, w.prefill_tokens, w.long_tokens, w.decode_tokens))
        and not any(
            (
                w.kv_tokens,
                w.kv_coming,
                w.running_prefixes.tokens,
                w.running_prefixes.saved,
                w.num_decoding,
            )
        )
        for w in workers
    )
