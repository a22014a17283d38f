"""The admin API: workers, decisions and configuration, on its own port.

Every handler is a coroutine: the fleet belongs to the event loop, and FastAPI runs plain functions
in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query, Request

from proxy.admin.auth import HostCheck
from proxy.admin.body_limit import BodyLimit
from proxy.admin.errors import HANDLED, INVALID, AdminError, ErrorAnswer, handle_error
from proxy.admin.key import AdminKey
from proxy.admin.log_routes import log_routes
from proxy.admin.reference import reference_routes
from proxy.admin.schemas import (
    Drained,
    Explanation,
    Question,
    Reloaded,
    Removed,
    WorkerShown,
    explanation,
    shown_worker,
)
from proxy.admin.status_routes import page_routes
from proxy.config import FleetConfig, WorkerConfig, shown
from proxy.config.workers import address_of, server_at
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.router import Router
from proxy.errors import Problem
from proxy.health.balance import Balance, BalanceShown
from proxy.metrics.recent import RecentRequest, RequestFilter
from proxy.status_page.live import LiveView
from proxy.telemetry.logs import Logs
from proxy.wire.exchange.moves import MovedRequests

MAX_DECISIONS = 1000  # in one response
logger = logging.getLogger(__name__)


class AdminState(Protocol):
    """The running router, as the admin API uses it."""

    router: Router
    logs: Logs
    live: LiveView  # the last minute, for the status page
    balance: Balance
    config: FleetConfig  # as last read

    def report_drain(self, name: str, *, draining: bool, at_once: bool) -> None:
        """Report to other processes that a worker is drained or not drained any more."""

    async def decisions(self, limit: int, wanted: RequestFilter) -> list[RecentRequest]:
        """Return the last requests that match, newest first."""

    async def move_requests(self, name: str) -> MovedRequests:
        """Move the requests of a drained worker to others, and return after a few seconds."""

    def add_worker(self, worker: WorkerConfig) -> None:
        """Add a worker that has a URL; its name and URL must be new."""

    def remove_worker(self, name: str) -> None:
        """Remove an existing worker; its requests in flight finish.

        Raises `ProxyError` for a worker that discovery would add again.
        """

    async def reload(self) -> list[str]:
        """Read the fleet file again and return the settings that need a restart.

        Raises `ProxyError` if the file is invalid; nothing has changed then.
        """


def admin_app(
    state: AdminState,
    host: str,
    clock: Callable[[], float] = time.monotonic,
    key: AdminKey | None = None,
) -> FastAPI:
    """Return the ASGI app of the admin API, which listens on `host`."""
    problem = {"model": ErrorAnswer}
    app = FastAPI(
        title="vllm-sched router",
        description="Workers, decisions and configuration of a running router.",
        responses={"4XX": problem, 422: problem},
        docs_url=None,  # FastAPI's pages load unpinned scripts from a CDN
        redoc_url=None,
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(HostCheck, host=host, key=key)
    for error_type in HANDLED:
        app.add_exception_handler(error_type, handle_error)
    workers, decisions = worker_routes(state, clock), decision_routes(state, clock)
    strict = [Depends(refuse_unknown_parameters)]
    for routes, prefix, tag in (
        (workers, "/admin/workers", "workers"),
        (decisions, "/admin", "decisions"),
        (config_routes(state), "/admin", "configuration"),
        (log_routes(state.logs), "/admin", "configuration"),
    ):
        app.include_router(routes, prefix=prefix, tags=[tag], dependencies=strict)
    app.include_router(page_routes(state.live))
    app.include_router(reference_routes(app))
    return app


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse a misspelled parameter, such as `drain?noww=true`."""
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    if unknown := request.query_params.keys() - known:
        why = f"unknown parameter; valid: {', '.join(sorted(known)) or 'none'}"
        problems = [Problem(name, why) for name in sorted(unknown)]
        raise AdminError(INVALID, "invalid", "the request has unknown parameters", problems)


def worker_routes(state: AdminState, clock: Callable[[], float]) -> APIRouter:
    api = APIRouter()

    def find(name: str) -> Worker:
        if (worker := state.router.fleet.roster.get(name)) is None:
            raise AdminError(HTTPStatus.NOT_FOUND, "no_such_worker", f"there is no worker {name!r}")
        return worker

    @api.get("", summary="List the workers")
    async def workers() -> list[WorkerShown]:
        now = clock()
        return [shown_worker(worker, now) for worker in state.router.fleet.roster]

    @api.post("", status_code=HTTPStatus.CREATED, summary="Add a worker")
    async def add(worker: WorkerConfig) -> WorkerShown:
        """Add a worker.

        The worker gets requests once a probe succeeds. A reload of the fleet file removes the
        worker.
        """
        refuse_conflicts(worker, list(state.router.fleet.roster), state.config)
        state.add_worker(worker)
        logger.info("worker %s is added by the admin API, until a reload or restart", worker.name)
        return shown_worker(find(worker.name), clock())

    @api.post("/{name}/drain", summary="Drain a worker: no new requests; requests in flight finish")
    async def drain_worker(
        name: str,
        now: Annotated[
            bool, Query(description="move requests and streams to other workers at once")
        ] = False,
    ) -> Drained:
        """Drain a worker. With `now`, call again to see what remains."""
        worker = find(name)
        if not worker.draining:
            logger.info("worker %s is drained by the admin API, and gets no new requests", name)
        state.router.fleet.roster.drain(name)
        state.report_drain(name, draining=True, at_once=now)
        moved, remaining = await state.move_requests(name) if now else (0, {})
        shown = shown_worker(worker, clock()).model_dump()
        return Drained(**shown, moved=moved, remaining=dict(remaining))

    @api.post("/{name}/undrain", summary="End a worker's draining")
    async def undrain_worker(name: str) -> WorkerShown:
        worker = find(name)
        if worker.draining:
            logger.info("worker %s is not drained any more", name)
        state.router.fleet.roster.drain(name, draining=False)
        state.report_drain(name, draining=False, at_once=False)
        return shown_worker(worker, clock())

    @api.delete("/{name}", summary="Remove a worker; requests in flight finish")
    async def remove(name: str) -> Removed:
        """Remove a worker.

        A reload or a restart adds the workers of the fleet file again. A worker that discovery
        found is not removed: drain it instead.
        """
        worker = find(name)
        # Of all processes; unknown after the removal.
        requests = worker.requests + worker.unfetched_handovers
        state.remove_worker(name)
        logger.info("worker %s is removed by the admin API, until a reload or restart", name)
        return Removed(name=name, requests=requests)

    return api


def refuse_conflicts(worker: WorkerConfig, others: list[Worker], config: FleetConfig) -> None:
    """Raise `AdminError` if a worker cannot join the fleet."""
    problems = []
    place = None if worker.address is None else server_at(*worker.address)
    router_ports = (config.router, config.router.admin)
    if place is None:
        problems.append(Problem("url", "missing; write http://host:port"))
    elif place in {server_at(port.host, port.port) for port in router_ports}:
        problems.append(Problem("url", "is this router's own address; give that of a worker"))
    if worker.launch is not None:
        problems.append(Problem("launch", "only `vllm-sched up` starts workers; remove it"))
    if worker.role in ("prefill", "decode") and config.transfer is None:
        why = "the fleet file has no connector; add transfer: nixl and restart"
        problems.append(Problem("role", f"{worker.role!r}: {why}"))
    if problems:
        raise AdminError(INVALID, "invalid", "the worker cannot be added", problems)
    for other in others:
        if other.name == worker.name or server_at(*address_of(other.url)) == place:
            message = f"worker {other.name!r} at {other.url} is already in the fleet"
            raise AdminError(HTTPStatus.CONFLICT, "conflict", message)


def decision_routes(state: AdminState, clock: Callable[[], float]) -> APIRouter:
    api = APIRouter()

    @api.get("/decisions", summary="Show the last requests, newest first")
    async def decisions(
        limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 100,
        model: str | None = None,
        worker: str | None = None,
        reason: Reason | None = None,
        status: int | None = None,
    ) -> list[RecentRequest]:
        return await state.decisions(limit, RequestFilter(model, worker, reason, status))

    @api.post("/explain", summary="Show where a request would be sent now, and why")
    async def explain(question: Question) -> Explanation:
        if question.tenant and state.router.tenants.get(question.tenant) is None:
            message = f"there is no tenant {question.tenant!r}"
            raise AdminError(HTTPStatus.NOT_FOUND, "no_such_tenant", message)
        return explanation(state.router, question, state.config.model, clock())

    @api.get(
        "/balance", summary="Show the load of prefill and decode workers, and which are too few"
    )
    async def balance() -> list[BalanceShown]:
        """Return one entry for each model with prefill and decode workers."""
        return state.balance.shown()

    return api


def config_routes(state: AdminState) -> APIRouter:
    api = APIRouter()

    @api.get("/config", summary="Show the fleet file with its defaults; secrets are hidden")
    async def config() -> dict[str, Any]:
        return shown(state.config)

    @api.post("/reload", summary="Read the fleet file again")
    async def reload() -> Reloaded:
        """Apply the fleet file if it is valid. Requests in flight are not affected."""
        needs_restart = await state.reload()
        return Reloaded(
            workers=tuple(worker.name for worker in state.router.fleet.roster),
            needs_restart=tuple(needs_restart),
        )

    return api
