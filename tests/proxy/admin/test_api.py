"""The admin API: responses and refusals."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import escape
from typing import Any

import httpx
import pytest

from proxy.admin.api import admin_app
from proxy.admin.reference import reference_page
from proxy.config import FleetConfig, WorkerConfig, parse
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.router import Router, RouterSettings
from proxy.errors import ConfigError, Problem, ProxyError
from proxy.health.balance import Balance
from proxy.metrics.recent import RecentRequest, RecentRequests, RequestFilter
from proxy.metrics.registry import Metrics
from proxy.status_page.live import LiveView
from proxy.status_page.snapshot import LiveState
from proxy.telemetry.logs import Logs
from proxy.wire.exchange.moves import MovedRequests
from tests.proxy.metrics.finished import finished

FLEET = """
model: tiny
workers:
  - {name: s0, role: short, url: "http://127.0.0.1:9001", max_model_len: 4096, api_key: secret-1}
  - {name: l0, role: long, url: "http://127.0.0.1:9002", max_model_len: 16384}
routing: {short_limit: 1000}
"""
NOW = 100.0


class State:
    """A router that does not run."""

    def __init__(self) -> None:
        self.config: FleetConfig = parse(FLEET, "fleet.yaml")
        self.router = Router(RouterSettings(short_limit=1000), Fleet())
        for worker in self.config.workers:
            self.add_worker(worker)
        self.recent = RecentRequests()
        self.balance = Balance(self.router)
        self.live = LiveView(Metrics(self.router), LiveState(Metrics(self.router)))
        self.logs = Logs(self.config, Metrics(self.router))
        self.error: Exception | None = None
        self.reloads = 0
        self.moved: list[str] = []
        self.drains: list[tuple[str, bool, bool]] = []  # reported to other hosts

    def drained(self, name: str, draining: bool, now: bool) -> None:
        self.drains.append((name, draining, now))

    async def move_requests(self, name: str) -> MovedRequests:
        """Pretend to move requests."""
        self.moved.append(name)
        return 3, {"field": 2}

    async def decisions(self, limit: int, wanted: RequestFilter) -> list[RecentRequest]:
        return list(self.recent.newest(limit, wanted))

    def add_worker(self, worker: WorkerConfig) -> None:
        """Add a worker to the fleet."""
        spec = WorkerSpec(
            worker.name,
            worker.url or "",
            Role(worker.role),
            self.config.model_of(worker),
            worker.max_model_len,
            api_key=worker.api_key,
        )
        self.router.fleet.roster.add(spec)

    def remove_worker(self, name: str) -> None:
        """Remove a worker."""
        self.router.fleet.roster.remove(name)

    async def reload(self) -> list[str]:
        """Pretend to read the fleet file."""
        self.reloads += 1
        if self.error is not None:
            raise self.error
        return ["router.port"]

    def worker(self, name: str) -> Worker:
        """Return a worker."""
        worker = self.router.fleet.roster.get(name)
        assert worker is not None
        return worker

    def mark_up(self) -> None:
        """Mark every worker up."""
        for worker in self.router.fleet.roster:
            while not worker.up:
                self.router.fleet.health.probe_ok(worker.name, NOW)

    def mark_down(self) -> None:
        """Mark every worker down."""
        for worker in self.router.fleet.roster:
            while worker.up or not worker.probed:
                self.router.fleet.health.probe_failed(worker.name, NOW)


@pytest.fixture
def state() -> State:
    """Return a state."""
    return State()


@pytest.fixture
async def api(state: State) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the API."""
    transport = httpx.ASGITransport(
        admin_app(state, "127.0.0.1", lambda: NOW), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check the shape of an error; return it."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "code", "problems"}
    assert body["error"]["message"]
    return dict(body["error"])


def charge(state: State, name: str, request: str = "r1") -> Any:
    """Charge a request to a worker."""
    info = RequestInfo(request, "completions", "tiny", 400, 100, 0, 100, 20, expected_output=20)
    return state.router.fleet.charge(info, Decision(state.worker(name), Reason.SHORT_POOL), NOW)


async def test_workers_are_listed_with_their_charges(state: State, api: httpx.AsyncClient) -> None:
    state.router.fleet.health.probe_ok("s0", NOW)
    gauges = Gauges(at=NOW - 0.5, running=3, waiting=1, kv_usage=0.5, kv_capacity_tokens=1600)
    state.router.fleet.health.set_gauges("s0", gauges)
    charge(state, "s0")
    short, long = (await api.get("/admin/workers")).json()
    assert (short["name"], short["role"], short["state"]) == ("s0", "short", "up")
    assert (short["requests"], short["prefill_tokens"], short["decode_tokens"]) == (1, 100, 20)
    assert short["engine"] == {
        "age_s": 0.5, "running": 3, "waiting": 1, "kv_usage": 0.5, "kv_capacity_tokens": 1600,
    }  # fmt: skip
    assert short["max_model_len"] == 4096
    assert (long["name"], long["state"], long["engine"]) == ("l0", "starting", None)


async def test_responses_contain_no_secrets(state: State, api: httpx.AsyncClient) -> None:
    charge(state, "s0")
    for path in ("/admin/workers", "/admin/config", "/admin/decisions", "/openapi.json"):
        answer = await api.get(path)
        assert answer.status_code == 200
        assert "secret-1" not in answer.text
    assert (await api.get("/admin/config")).json()["workers"][0]["api_key"] == "***"


async def test_worker_states_are_shown(state: State, api: httpx.AsyncClient) -> None:
    async def state_of(name: str) -> str:
        workers = (await api.get("/admin/workers")).json()
        return str({worker["name"]: worker["state"] for worker in workers}[name])

    fleet = state.router.fleet
    fleet.health.probe_failed("s0", NOW)
    assert await state_of("s0") == "down"
    state.mark_up()
    assert await state_of("s0") == "up"
    fleet.health.record_failure(state.worker("s0"), NOW, 5.0, busy=True, why="503")
    assert await state_of("s0") == "resting"
    shown = (await api.get("/admin/workers")).json()[0]
    assert shown["why"] == "it returned 503; no requests for 5 s more"
    for _ in range(3):
        fleet.health.probe_failed("s0", NOW)
    assert await state_of("s0") == "down"


async def test_drain_keeps_running_requests(state: State, api: httpx.AsyncClient) -> None:
    state.mark_up()
    lease = charge(state, "s0")
    drained = (await api.post("/admin/workers/s0/drain")).json()
    assert (drained["state"], drained["requests"]) == ("draining", 1)
    assert state.worker("s0").draining
    state.router.fleet.release(lease)
    assert (await api.get("/admin/workers")).json()[0]["state"] == "drained"
    assert (await api.post("/admin/workers/s0/undrain")).json()["state"] == "up"
    assert not state.worker("s0").draining
    assert state.drains == [("s0", True, False), ("s0", False, False)]


async def test_drain_now_moves_requests(state: State, api: httpx.AsyncClient) -> None:
    state.mark_up()
    plain = (await api.post("/admin/workers/s0/drain")).json()
    assert (state.moved, plain["moved"], plain["remaining"]) == ([], 0, {})
    drained = (await api.post("/admin/workers/s0/drain?now=true")).json()
    assert state.moved == ["s0"]
    assert (drained["state"], drained["moved"], drained["remaining"]) == (
        "drained", 3, {"field": 2},
    )  # fmt: skip
    assert state.worker("s0").draining
    assert (await api.post("/admin/workers/s0/drain?now=perhaps")).status_code == 422
    assert (await api.post("/admin/workers/x/drain?now=true")).status_code == 404


async def test_worker_is_added(state: State, api: httpx.AsyncClient) -> None:
    worker = {"name": "g0", "url": "http://127.0.0.1:9003/", "api_key": "secret-2"}
    answer = await api.post("/admin/workers", json=worker)
    assert answer.status_code == 201
    assert answer.json()["state"] == "starting"
    assert "secret-2" not in answer.text
    spec = state.worker("g0").spec
    assert (spec.url, spec.role, spec.model) == ("http://127.0.0.1:9003", "general", "tiny")
    assert spec.api_key == "secret-2"


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ({"url": "http://127.0.0.1:9"}, "name"),
        ({"name": "g0"}, "url"),
        ({"name": "g0", "url": "ftp://x"}, "url"),
        ({"name": "g 0", "url": "http://127.0.0.1:9"}, "name"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "rôle": "long"}, "rôle"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "role": "prefill"}, "role"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "max_requests": "7"}, "max_requests"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "launch": {}}, "launch"),
    ],
)
async def test_invalid_worker_is_refused(
    state: State, api: httpx.AsyncClient, worker: dict[str, Any], path: str
) -> None:
    worker = {"api_key": "secret-2"} | worker
    answer = await api.post("/admin/workers", json=worker)
    error = error_of(answer, 422)
    assert [problem["path"] for problem in error["problems"]] == [path]
    assert "secret-2" not in answer.text
    assert len(state.router.fleet.roster) == 2


@pytest.mark.parametrize(
    "worker",
    [
        {"name": "s0", "url": "http://127.0.0.1:9"},
        {"name": "g0", "url": "http://127.0.0.1:9001"},
    ],
)
async def test_existing_worker_is_refused(api: httpx.AsyncClient, worker: dict[str, str]) -> None:
    error = error_of(await api.post("/admin/workers", json=worker), 409)
    assert "'s0'" in error["message"]


async def test_removed_worker_keeps_running_requests(state: State, api: httpx.AsyncClient) -> None:
    worker = state.worker("s0")
    lease = charge(state, "s0")
    assert (await api.delete("/admin/workers/s0")).json() == {"name": "s0", "requests": 1}
    assert [w["name"] for w in (await api.get("/admin/workers")).json()] == ["l0"]
    assert state.router.fleet.release(lease)
    assert worker.requests == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/workers/x/drain"),
        ("POST", "/admin/workers/x/undrain"),
        ("DELETE", "/admin/workers/x"),
    ],
)
async def test_unknown_worker_gets_404(api: httpx.AsyncClient, method: str, path: str) -> None:
    error = error_of(await api.request(method, path), 404)
    assert error["code"] == "no_such_worker"
    assert "'x'" in error["message"]


async def test_decisions_are_filtered(state: State, api: httpx.AsyncClient) -> None:
    for number, name in enumerate(["s0", "l0", "s0"]):
        lease = charge(state, name, request=f"r{number}")
        recent = state.recent
        recent.add(lease.ask, lease.decision, finished(reason=Reason.SHORT_POOL, ttft_s=0.1))
    everything = (await api.get("/admin/decisions")).json()
    assert [entry["id"] for entry in everything] == ["r2", "r1", "r0"]
    assert everything[0]["worker"] == "s0"
    assert everything[0]["reason"] == "short_pool"
    last = (await api.get("/admin/decisions", params={"worker": "s0", "limit": 1})).json()
    assert [entry["id"] for entry in last] == ["r2"]
    assert (await api.get("/admin/decisions", params={"reason": "long_pool"})).json() == []


@pytest.mark.parametrize("query", ["limit=0", "limit=100000", "reason=whim", "status=x"])
async def test_invalid_filter_is_refused(api: httpx.AsyncClient, query: str) -> None:
    error = error_of(await api.get(f"/admin/decisions?{query}"), 422)
    assert error["problems"][0]["path"] == query.partition("=")[0]


async def test_explain_shows_worker_and_scores(state: State, api: httpx.AsyncClient) -> None:
    state.mark_up()
    for worker in state.router.fleet.roster:
        worker.reports_prefixes = worker.name == "l0"
    body = {"prompt_tokens": 8000, "max_tokens": 100}
    explained = (await api.post("/admin/explain", json=body)).json()
    assert explained["worker"] == "l0"
    assert explained["status"] is None
    scores = {score["worker"]: score for score in explained["scores"]}
    assert set(scores) == {"s0", "l0"}
    assert "4096" in scores["s0"]["note"]  # the reason against the worker
    assert [scores[name]["cached_reported"] for name in ("s0", "l0")] == [False, True]
    short = (await api.post("/admin/explain", json={"prompt_tokens": 10})).json()
    assert short["worker"] == "s0"
    assert not any(worker.requests for worker in state.router.fleet.roster)  # no charges


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt_tokens": 20_000}, 400, "too_long"),
        ({"prompt_tokens": 16_000, "max_tokens": 999}, 400, "too_long"),
        ({"prompt_tokens": 10, "max_tokens": 20_000}, 400, "too_long"),
        ({"prompt_tokens": 10, "model": "huge"}, 404, "unknown_model"),
        ({"prompt_tokens": 10}, 503, "no_worker"),
    ],
)
async def test_explain_returns_the_clients_error(
    state: State, api: httpx.AsyncClient, body: dict[str, Any], status: int, reason: str
) -> None:
    if reason == "no_worker":
        state.mark_down()
    else:
        state.mark_up()
    explained = (await api.post("/admin/explain", json=body)).json()
    assert (explained["worker"], explained["status"], explained["reason"]) == (None, status, reason)
    assert explained["message"]


async def test_explain_before_the_first_probe_is_fleet_full(api: httpx.AsyncClient) -> None:
    explained = (await api.post("/admin/explain", json={"prompt_tokens": 10})).json()
    assert (explained["worker"], explained["reason"]) == (None, "fleet_full")
    assert "not probed yet" in explained["message"]
    assert {score["note"] for score in explained["scores"]} == {"not probed yet"}
    adapter = {"prompt_tokens": 10, "model": "adapter"}  # workers may list it later
    explained = (await api.post("/admin/explain", json=adapter)).json()
    assert (explained["status"], explained["reason"]) == (503, "not_known_yet")


@pytest.mark.parametrize("body", [{}, {"prompt_tokens": 0}, {"prompt_tokens": 1, "n": 1}])
async def test_invalid_explain_request_is_refused(
    api: httpx.AsyncClient, body: dict[str, int]
) -> None:
    error_of(await api.post("/admin/explain", json=body), 422)


async def test_reload_returns_workers_and_restart_settings(
    state: State, api: httpx.AsyncClient
) -> None:
    explained = (await api.post("/admin/reload")).json()
    assert explained == {"workers": ["s0", "l0"], "needs_restart": ["router.port"]}
    assert state.reloads == 1


async def test_reload_returns_all_problems_of_the_file(
    state: State, api: httpx.AsyncClient
) -> None:
    problems = [Problem("workers[0].url", "bad"), Problem("routing.policy", "worse")]
    state.error = ConfigError("fleet.yaml", problems)
    error = error_of(await api.post("/admin/reload"), 422)
    assert "fleet.yaml" in error["message"]
    assert error["problems"] == [
        {"path": "workers[0].url", "message": "bad"},
        {"path": "routing.policy", "message": "worse"},
    ]


async def test_reload_without_a_file_gets_409(state: State, api: httpx.AsyncClient) -> None:
    state.error = ProxyError("no file")
    assert error_of(await api.post("/admin/reload"), 409)["message"] == "no file"


async def test_internal_error_has_the_same_shape(state: State, api: httpx.AsyncClient) -> None:
    state.error = RuntimeError("secret-1")
    answer = await api.post("/admin/reload")
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "secret-1" not in answer.text


async def test_unknown_path_and_method_are_refused(api: httpx.AsyncClient) -> None:
    assert error_of(await api.get("/nowhere"), 404)["code"] == "not_found"
    answer = await api.put("/admin/workers")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert "GET" in answer.headers["Allow"]
    error_of(await api.post("/admin/explain", content=b"{"), 422)


async def test_openapi_describes_all_operations(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]
    operations = [op for path in paths.values() for op in path.values()]
    assert len(operations) == 13
    assert all(operation["summary"] for operation in operations)


async def test_docs_page_is_complete_and_fetches_nothing(api: httpx.AsyncClient) -> None:
    described = (await api.get("/openapi.json")).json()
    answer = await api.get("/docs")
    assert answer.status_code == 200
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            heading = f"<code>{method.upper()} {path}</code> {escape(operation['summary'])}"
            assert heading in answer.text
    shapes = described["components"]["schemas"]
    assert all(f'<section id="{name}">' in answer.text for name in shapes)
    links = re.findall(r'(?:href|src|action)="([^"]*)"', answer.text)
    assert {link for link in links if not link.startswith("#")} == {"/openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(shapes)
    assert "<script" not in answer.text
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'none'; style-src 'sha256-")


def test_docs_page_escapes_markup() -> None:
    evil = "<script>alert(1)</script>"
    operation = {"summary": evil, "description": evil, "responses": {}}
    schema = {"description": evil, "properties": {"a": {"description": evil, "enum": [evil]}}}
    page = reference_page(
        {
            "info": {"title": evil},
            "paths": {"/a": {"get": operation}},
            "components": {"schemas": {"A": schema}},
        }
    )
    assert page.count(escape(evil)) >= 6
    assert "<script" not in page


async def test_balance_without_both_sides_is_empty(api: httpx.AsyncClient) -> None:
    answer = await api.get("/admin/balance")
    assert (answer.status_code, answer.json()) == (200, [])


async def test_balance_of_both_sides(state: State, api: httpx.AsyncClient) -> None:
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        state.router.fleet.roster.add(WorkerSpec(name, f"http://{name}", role, "tiny"))
    state.mark_up()
    state.balance.sample(NOW)
    [shown] = (await api.get("/admin/balance")).json()
    assert shown["model"] == "tiny"
    assert shown["prefill"] == {
        "workers": 1, "busy": 0.0, "wanted": 0.0, "ahead_s": 0.0, "step_s": None
    }  # fmt: skip
    assert shown["short"] == "neither"
