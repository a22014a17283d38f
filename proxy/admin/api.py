"""The admin API: workers, decisions, configuration; on a port of its own.

Every handler is a coroutine, even where nothing is awaited: the fleet belongs to the event loop,
and FastAPI runs plain functions in threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, FastAPI, Query

from proxy.admin.auth import HostCheck
from proxy.admin.body_limit import BodyLimit
from proxy.admin.errors import HANDLED, INVALID, AdminError, ErrorAnswer, answer
from proxy.admin.key import AdminKey
from proxy.admin.log_routes import log_routes
from proxy.admin.reference import reference_routes
from proxy.admin.schemas import (
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
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Reason
from proxy.core.router import Router
from proxy.errors import Problem
from proxy.health.balance import Balance, BalanceShown
from proxy.metrics.recent import RecentRequest
from proxy.status_page.live import LiveView
from proxy.telemetry.logs import Logs

MOST_DECISIONS = 1000  # in one answer


class AdminState(Protocol):
    """The running router, as the admin API needs it."""

    @property
    def router(self) -> Router:
        """Decisions and workers."""

    async def decisions(
        self,
        limit: int,
        *,
        model: str | None,
        worker: str | None,
        reason: Reason | None,
        status: int | None,
    ) -> list[RecentRequest]:
        """Return the last requests that are so, newest first."""

    @property
    def logs(self) -> Logs:
        """What is logged."""

    @property
    def live(self) -> LiveView:
        """The last minute, for the status page."""

    @property
    def balance(self) -> Balance:
        """How busy both sides of hand-overs are."""

    @property
    def config(self) -> FleetConfig:
        """What the fleet file said when it was read last."""

    def add_worker(self, worker: WorkerConfig) -> None:
        """Take in a worker that has a URL, and whose name and URL are new."""

    def remove_worker(self, name: str) -> None:
        """Take out a worker that is there; its requests in flight finish."""

    async def reload(self) -> list[str]:
        """Read the fleet file again; return what will change only with the next start.

        Raises `ProxyError` if it can't be used, and then nothing has changed.
        """


def admin_app(
    state: AdminState, clock: Callable[[], float] = time.monotonic, key: AdminKey | None = None
) -> FastAPI:
    """Make the API."""
    problem = {"model": ErrorAnswer}
    app = FastAPI(
        title="vllm-sched router",
        description="Workers, decisions and configuration of a running router.",
        responses={"4XX": problem, 422: problem},
        docs_url=None,  # FastAPI's pages run script from elsewhere, unpinned
        redoc_url=None,
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(HostCheck, host=state.config.router.admin.host, key=key)
    for kind in HANDLED:
        app.add_exception_handler(kind, answer)
    app.include_router(worker_routes(state, clock), prefix="/admin/workers", tags=["workers"])
    app.include_router(decision_routes(state, clock), prefix="/admin", tags=["decisions"])
    app.include_router(config_routes(state), prefix="/admin", tags=["configuration"])
    app.include_router(page_routes(state.live))
    app.include_router(reference_routes(app))
    app.include_router(log_routes(state.logs), prefix="/admin", tags=["configuration"])
    return app


def worker_routes(state: AdminState, clock: Callable[[], float]) -> APIRouter:
    """List, add, drain, remove."""
    api = APIRouter()

    def find(name: str) -> Worker:
        if (worker := state.router.fleet.get(name)) is None:
            raise AdminError(HTTPStatus.NOT_FOUND, "no_such_worker", f"no worker is named {name!r}")
        return worker

    def drain(name: str, *, draining: bool) -> WorkerShown:
        worker = find(name)
        state.router.fleet.drain(name, draining=draining)
        return shown_worker(worker, clock())

    @api.get("", summary="List the workers")
    async def workers() -> list[WorkerShown]:
        now = clock()
        return [shown_worker(worker, now) for worker in state.router.fleet]

    @api.post("", status_code=HTTPStatus.CREATED, summary="Add a worker")
    async def add(worker: WorkerConfig) -> WorkerShown:
        """Add it; it gets requests once it was probed. A reload of the fleet file removes it."""
        refuse_conflicts(worker, list(state.router.fleet), moves=state.config.transfer is not None)
        state.add_worker(worker)
        return shown_worker(find(worker.name), clock())

    @api.post("/{name}/drain", summary="Give a worker nothing new; what it has, it finishes")
    async def drain_worker(name: str) -> WorkerShown:
        return drain(name, draining=True)

    @api.post("/{name}/undrain", summary="Give a worker requests again")
    async def undrain_worker(name: str) -> WorkerShown:
        return drain(name, draining=False)

    @api.delete("/{name}", summary="Take a worker out at once; what it has, it finishes")
    async def remove(name: str) -> Removed:
        worker = find(name)
        requests = worker.requests + worker.pinned  # of all processes, as long as it is here
        state.remove_worker(name)
        return Removed(name=name, requests=requests)

    return api


def refuse_conflicts(worker: WorkerConfig, others: list[Worker], *, moves: bool = False) -> None:
    """Raise where a worker can't join the others."""
    problems = []
    if worker.url is None:
        problems.append(Problem("url", "is missing; write it as http://host:port"))
    if worker.launch is not None:
        problems.append(Problem("launch", "only `vllm-sched up` starts workers; leave it out"))
    if worker.role in ("prefill", "decode") and not moves:
        why = "the fleet file names no connector; add transfer: nixl there and restart"
        problems.append(Problem("role", f"{worker.role!r}: {why}"))
    if problems:
        raise AdminError(INVALID, "invalid", "this worker can't be added", problems)
    for other in others:
        if other.name == worker.name or other.url == worker.url:
            message = f"worker {other.name!r} at {other.url} is in the fleet already"
            raise AdminError(HTTPStatus.CONFLICT, "conflict", message)


def decision_routes(state: AdminState, clock: Callable[[], float]) -> APIRouter:
    """Show what was decided, and what would be."""
    api = APIRouter()

    @api.get("/decisions", summary="Show the last requests, newest first")
    async def decisions(
        limit: Annotated[int, Query(ge=1, le=MOST_DECISIONS)] = 100,
        model: str | None = None,
        worker: str | None = None,
        reason: Reason | None = None,
        status: int | None = None,
    ) -> list[RecentRequest]:
        return await state.decisions(
            limit, model=model, worker=worker, reason=reason, status=status
        )

    @api.post("/explain", summary="Say where a request would go now, and why")
    async def explain(question: Question) -> Explanation:
        return explanation(state.router, question, state.config.model, clock())

    @api.get("/balance", summary="Show how busy prefill and decode workers are, and who is short")
    async def balance() -> list[BalanceShown]:
        """One entry for each model that has workers of both kinds."""
        return state.balance.shown()

    return api


def config_routes(state: AdminState) -> APIRouter:
    """Show the configuration, and take a new one."""
    api = APIRouter()

    @api.get("/config", summary="Show the fleet file with its defaults; secrets are hidden")
    async def config() -> dict[str, Any]:
        return shown(state.config)

    @api.post("/reload", summary="Read the fleet file again")
    async def reload() -> Reloaded:
        """Take what it says, unless anything is wrong in it. Requests in flight are not touched."""
        late = await state.reload()
        return Reloaded(
            workers=tuple(worker.name for worker in state.router.fleet), needs_restart=tuple(late)
        )

    return api
