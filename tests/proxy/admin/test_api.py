"""The admin API: responses and refusals."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html import escape
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import httpx
import pytest

from proxy.admin.api import admin_app
from proxy.admin.body_limit import MAX_BODY_BYTES
from proxy.admin.reference import reference_page
from proxy.config import parse
from proxy.core.fleet.leases import Decision
from proxy.core.model.role import Role
from proxy.core.model.route_table import ROUTES
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Reason, ReceivedRequest, Refusal, RequestInfo
from proxy.errors import ConfigError, Problem, ProxyError
from proxy.setup.app import App, SiblingProcesses
from tests.proxy.core.making import make_info, spec, worker_of
from tests.proxy.metrics.finished import finished

FLEET = """
model: tiny
workers:
  - {name: s0, role: short, url: "http://127.0.0.1:9001", max_model_len: 4096, api_key: secret-1}
  - {name: l0, role: long, url: "http://127.0.0.1:9002", max_model_len: 16384}
routing: {short_limit: 1000}
"""
NOW = 100.0


@pytest.fixture
async def app() -> AsyncIterator[App]:
    """Return a router that does not run."""
    app = App(parse(FLEET, "fleet.yaml"))
    yield app
    await app.stop()


def mark_up(app: App) -> None:
    for worker in app.fleet.roster:
        app.fleet.health.probe_ok(worker.name, NOW)


@pytest.fixture
async def api(app: App) -> AsyncIterator[httpx.AsyncClient]:
    asgi = admin_app(app, "127.0.0.1", lambda: NOW)
    transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
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


def charge(app: App, name: str, request: str = "r1") -> Any:
    info = make_info(output=20, model="tiny")
    info.id = request
    return app.fleet.charge(info, Decision(worker_of(app.router, name), Reason.SHORT_POOL), NOW)


async def test_workers_are_listed_with_their_charges(app: App, api: httpx.AsyncClient) -> None:
    app.fleet.health.probe_ok("s0", NOW)
    gauges = Gauges(at=NOW - 0.5, running=3, waiting=1, kv_usage=0.5, kv_capacity_tokens=1600)
    app.fleet.health.set_gauges("s0", gauges)
    charge(app, "s0")
    short, long = (await api.get("/admin/workers")).json()
    assert (short["name"], short["role"], short["state"]) == ("s0", "short", "up")
    assert (short["requests"], short["prefill_tokens"], short["decode_tokens"]) == (1, 100, 20)
    assert short["engine"] == {
        "age_s": 0.5, "running": 3, "waiting": 1, "kv_usage": 0.5, "kv_capacity_tokens": 1600,
    }  # fmt: skip
    assert short["max_model_len"] == 4096
    assert (long["name"], long["state"], long["engine"]) == ("l0", "starting", None)


async def test_resting_worker_shows_the_reason(app: App, api: httpx.AsyncClient) -> None:
    mark_up(app)
    app.fleet.health.record_failure(worker_of(app.router, "s0"), NOW, 5.0, busy=True, why="503")
    shown = (await api.get("/admin/workers")).json()[0]
    assert shown["state"] == "resting"
    assert shown["why"] == "it returned 503; no requests for 5 s more"


async def test_drain_keeps_running_requests(app: App, api: httpx.AsyncClient) -> None:
    mark_up(app)
    siblings = app.siblings = Mock(spec=SiblingProcesses)
    lease = charge(app, "s0")
    drained = (await api.post("/admin/workers/s0/drain")).json()
    assert (drained["state"], drained["requests"]) == ("draining", 1)
    assert worker_of(app.router, "s0").draining
    app.fleet.release(lease)
    assert (await api.get("/admin/workers")).json()[0]["state"] == "drained"
    assert (await api.post("/admin/workers/s0/undrain")).json()["state"] == "up"
    assert not worker_of(app.router, "s0").draining
    assert siblings.report_drain.mock_calls == [
        call("s0", draining=True, at_once=False),
        call("s0", draining=False, at_once=False),
    ]


async def test_drain_now_moves_requests(
    app: App, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = AsyncMock(return_value=(3, {"field": 2}))
    monkeypatch.setattr(app, "move_requests", move)
    mark_up(app)
    plain = (await api.post("/admin/workers/s0/drain")).json()
    assert (move.mock_calls, plain["moved"], plain["remaining"]) == ([], 0, {})
    drained = (await api.post("/admin/workers/s0/drain?now=true")).json()
    move.assert_called_once_with("s0")
    assert (drained["state"], drained["moved"], drained["remaining"]) == (
        "drained", 3, {"field": 2},
    )  # fmt: skip
    assert worker_of(app.router, "s0").draining
    assert (await api.post("/admin/workers/s0/drain?now=perhaps")).status_code == 422


async def test_worker_is_added(app: App, api: httpx.AsyncClient) -> None:
    worker = {"name": "g0", "url": "http://127.0.0.1:9003/", "api_key": "secret-2"}
    answer = await api.post("/admin/workers", json=worker)
    assert answer.status_code == 201
    assert answer.json()["state"] == "starting"
    assert "secret-2" not in answer.text
    spec = worker_of(app.router, "g0").spec
    assert (spec.url, spec.role, spec.model) == ("http://127.0.0.1:9003", "general", "tiny")
    assert spec.api_key == "secret-2"


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ({"url": "http://127.0.0.1:9"}, "name"),
        ({"name": "g0"}, "url"),
        ({"name": "g0", "url": "ftp://x"}, "url"),
        ({"name": "g0", "url": "http://localhost:8000"}, "url"),
        ({"name": "g0", "url": "http://127.0.0.1:8001"}, "url"),
        ({"name": "g 0", "url": "http://127.0.0.1:9"}, "name"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "rôle": "long"}, "rôle"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "role": "prefill"}, "role"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "max_requests": "7"}, "max_requests"),
        ({"name": "g0", "url": "http://127.0.0.1:9", "launch": {}}, "launch"),
    ],
)
async def test_invalid_worker_is_refused(
    app: App, api: httpx.AsyncClient, worker: dict[str, Any], path: str
) -> None:
    worker = {"api_key": "secret-2"} | worker
    answer = await api.post("/admin/workers", json=worker)
    error = error_of(answer, 422)
    assert [problem["path"] for problem in error["problems"]] == [path]
    assert "secret-2" not in answer.text
    assert len(app.fleet.roster) == 2


@pytest.mark.parametrize(
    "worker",
    [
        {"name": "s0", "url": "http://127.0.0.1:9"},
        {"name": "g0", "url": "http://127.0.0.1:9001"},
        {"name": "g0", "url": "http://localhost:9001"},
    ],
)
async def test_existing_worker_is_refused(api: httpx.AsyncClient, worker: dict[str, str]) -> None:
    error = error_of(await api.post("/admin/workers", json=worker), 409)
    assert "'s0'" in error["message"]


async def test_body_without_its_content_type(api: httpx.AsyncClient) -> None:
    """`curl -d` sends a form's content type."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = await api.post("/admin/explain", content=b'{"prompt_tokens": 5}', headers=form)
    assert "Content-Type: application/json" in error_of(sent, 422)["message"]


async def test_removed_worker_keeps_running_requests(app: App, api: httpx.AsyncClient) -> None:
    worker = worker_of(app.router, "s0")
    lease = charge(app, "s0")
    assert (await api.delete("/admin/workers/s0")).json() == {"name": "s0", "requests": 1}
    assert [w["name"] for w in (await api.get("/admin/workers")).json()] == ["l0"]
    assert app.fleet.release(lease)
    assert worker.requests == 0


async def test_model_without_its_removed_workers_is_still_known(
    app: App, api: httpx.AsyncClient
) -> None:
    """A worker may be replaced. A client would not repeat a request that gets 404."""
    body = b'{"model": "tiny", "messages": []}'
    for name in ("s0", "l0"):
        assert (await api.delete(f"/admin/workers/{name}")).is_success
    route = ROUTES["/v1/chat/completions"]
    info = app.router.read(ReceivedRequest(route, body, b"application/json", "id"))
    assert isinstance(info, RequestInfo)
    refused = app.router.submit(info, NOW)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (503, "no_worker")


async def test_discovered_worker_is_not_removed(
    app: App, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discovery would add it again, at the latest after a reload."""
    monkeypatch.setattr(app.discovery, "pool_of", {"s0": "short", "l0": ""}.get)
    error = error_of(await api.delete("/admin/workers/s0"), 409)
    assert "'s0' was found by discovery (pool short)" in error["message"]
    assert "drain it" in error["message"]
    assert (await api.delete("/admin/workers/l0")).json()["name"] == "l0"
    assert [w["name"] for w in (await api.get("/admin/workers")).json()] == ["s0"]


async def test_changes_of_workers_are_logged_once(
    api: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "proxy.admin.api")
    for path in 2 * ["s0/drain"] + 2 * ["s0/undrain"]:
        assert (await api.post(f"/admin/workers/{path}")).is_success
    await api.delete("/admin/workers/s0")
    await api.post("/admin/workers", json={"name": "g0", "url": "http://127.0.0.1:9003"})
    assert [text for name, _, text in caplog.record_tuples if name == "proxy.admin.api"] == [
        "worker s0 is drained by the admin API, and gets no new requests",
        "worker s0 is not drained any more",
        "worker s0 is removed by the admin API, until a reload or restart",
        "worker g0 is added by the admin API, until a reload or restart",
    ]


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


async def test_decisions_are_filtered(app: App, api: httpx.AsyncClient) -> None:
    for number, name in enumerate(["s0", "l0", "s0"]):
        lease = charge(app, name, request=f"r{number}")
        recent = app.metrics.recent
        recent.add(lease.info, lease.decision, finished(reason=Reason.SHORT_POOL, ttft_s=0.1))
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


async def test_explain_shows_worker_and_scores(app: App, api: httpx.AsyncClient) -> None:
    mark_up(app)
    for worker in app.fleet.roster:
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
    assert not any(worker.requests for worker in app.fleet.roster)  # no charges


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
    app: App, api: httpx.AsyncClient, body: dict[str, Any], status: int, reason: str
) -> None:
    mark_up(app)
    if reason == "no_worker":
        for _ in range(3):
            for name in ("s0", "l0"):
                app.fleet.health.probe_failed(name)
    explained = (await api.post("/admin/explain", json=body)).json()
    assert (explained["worker"], explained["status"], explained["reason"]) == (None, status, reason)
    assert explained["message"]


async def test_workers_and_explain_show_why_workers_are_not_up(
    app: App, api: httpx.AsyncClient
) -> None:
    mark_up(app)
    app.fleet.roster.set_served("l0", ("llama",))
    for _ in range(3):
        app.fleet.health.probe_failed("s0", "timed out")
    workers = (await api.get("/admin/workers")).json()
    assert [(worker["state"], worker["why"]) for worker in workers] == [
        ("down", "timed out"),
        ("wrong_model", "serves llama, not tiny"),
    ]
    explained = (await api.post("/admin/explain", json={"prompt_tokens": 10})).json()
    assert explained["status"] == 503
    notes = {score["worker"]: score["note"] for score in explained["scores"]}
    assert notes == {"s0": "down: timed out", "l0": "serves llama, not tiny"}


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
    app: App, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "reload", AsyncMock(return_value=["router.port"]))
    explained = (await api.post("/admin/reload")).json()
    assert explained == {"workers": ["s0", "l0"], "needs_restart": ["router.port"]}


PROBLEMS = [Problem("workers[0].url", "bad"), Problem("routing.policy", "worse")]


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (ConfigError("fleet.yaml", PROBLEMS), 422, "invalid_config", "fleet.yaml"),
        (ProxyError("no file"), 409, "conflict", "no file"),
        (RuntimeError("secret-1"), 500, "internal_error", ""),
    ],
)
async def test_failed_reload_is_an_error(
    app: App,
    api: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
    message: str,
) -> None:
    monkeypatch.setattr(app, "reload", AsyncMock(side_effect=error))
    answer = await api.post("/admin/reload")
    found = error_of(answer, status)
    assert found["code"] == code
    assert message in found["message"]
    assert "secret-1" not in answer.text
    wanted = PROBLEMS if isinstance(error, ConfigError) else []
    shown = [(problem["path"], problem["message"]) for problem in found["problems"]]
    assert shown == [(problem.path, problem.message) for problem in wanted]


async def test_unknown_parameters_are_refused(app: App, api: httpx.AsyncClient) -> None:
    for method, path, valid in (
        ("POST", "/admin/workers/s0/drain?noww=true", "now"),
        ("GET", "/admin/decisions?limit=5&noww=x", "limit, model, reason, status, worker"),
        ("POST", "/admin/reload?noww=", "none"),
    ):
        error = error_of(await api.request(method, path), 422)
        message = f"unknown parameter; valid: {valid}"
        assert error["problems"] == [{"path": "noww", "message": message, "name": ""}]
    assert not worker_of(app.router, "s0").draining


async def test_explain_of_an_unknown_tenant_is_404(api: httpx.AsyncClient) -> None:
    body = {"prompt_tokens": 10, "session": "s", "tenant": "t9"}
    error = error_of(await api.post("/admin/explain", json=body), 404)
    assert (error["code"], error["message"]) == ("no_such_tenant", "there is no tenant 't9'")


async def test_unknown_path_and_method_and_other_bodies_are_refused(api: httpx.AsyncClient) -> None:
    assert error_of(await api.get("/nowhere"), 404)["code"] == "not_found"
    answer = await api.put("/admin/workers")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert "GET" in answer.headers["Allow"]
    error_of(await api.post("/admin/explain", content=b"{"), 422)
    error_of(await api.post("/admin/explain", content=b" " * (MAX_BODY_BYTES + 1)), 413)


async def test_docs_page_is_complete_and_fetches_nothing(api: httpx.AsyncClient) -> None:
    described = (await api.get("/openapi.json")).json()
    assert sum(len(path) for path in described["paths"].values()) == 13
    answer = await api.get("/docs")
    assert answer.status_code == 200
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"]
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
    paths, components = {"/a": {"get": operation}}, {"schemas": {"A": schema}}
    page = reference_page({"info": {"title": evil}, "paths": paths, "components": components})
    assert page.count(escape(evil)) >= 6
    assert "<script" not in page


async def test_balance_is_shown_for_both_sides(app: App, api: httpx.AsyncClient) -> None:
    answer = await api.get("/admin/balance")
    assert (answer.status_code, answer.json()) == (200, [])
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        app.fleet.roster.add(spec(name, role))
    mark_up(app)
    app.balance.sample(NOW)
    [shown] = (await api.get("/admin/balance")).json()
    assert (shown["model"], shown["short"]) == ("m", "neither")
    assert shown["prefill"] == {
        "workers": 1, "busy": 0.0, "wanted": 0.0, "ahead_s": 0.0, "step_s": None
    }  # fmt: skip
