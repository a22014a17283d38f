"""What the router logs: of requests, of itself, and never of secrets."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from proxy.admin.log_routes import log_routes
from proxy.config import parse
from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.types import Reason
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from proxy.http.request import Request, RequestHead
from proxy.metrics.registry import Metrics
from proxy.telemetry.log_writer import LogWriter
from proxy.telemetry.logs import Logs, one_line
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import LONG, SHORT, ask, router_of, spec, worker_of

FLEET = """
model: tiny
workers: [{name: w0, url: "http://127.0.0.1:9001", api_key: very-secret-key}]
router: {logs: {%s}}
"""
TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Site:
    """A router's counts, and a log in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metrics = Metrics(router_of(spec("s0", SHORT), spec("l0", LONG)))
        self.fd = os.open(file, os.O_WRONLY | os.O_CREAT)
        self.logs = Logs(
            parse(FLEET % "", "fleet.yaml"), self.metrics, LogWriter(self.fd), lambda: 0.25
        )

    def said(self, settings: str) -> None:
        """Read the file anew, with these settings."""
        self.logs.reconfigure(parse(FLEET % settings, "fleet.yaml"))

    def request(self, body: bytes = b"{}", **headers: bytes) -> RequestRecord:
        """Begin a request."""
        record, head = RequestRecord(), RequestHead()
        head.special.update({name.encode(): value for name, value in headers.items()})
        request = Request(head, body)
        request.id = b"req-1"
        record.begin(10.0, request, self.metrics)
        record.ask = ask(prompt=120)
        return record

    def lines(self) -> list[str]:
        """Read what is logged by now."""
        assert self.logs.writer.flush(30.0)
        return self.file.read_text().splitlines()

    def told(self) -> dict[str, Any]:
        """Read the only line."""
        [line] = self.lines()
        return dict(json.loads(line))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Log to a file; Python's logging is afterwards as it was."""
    site, root = Site(tmp_path / "log"), logging.getLogger()
    level = root.level
    yield site
    site.logs.close()
    os.close(site.fd)
    root.setLevel(level)


def test_nobody_is_told_unless_it_is_wanted(site: Site) -> None:
    site.request().close(12.0, site.metrics, "completions", 200, None)
    assert site.lines() == []
    assert site.metrics.at_end == ()


def test_a_request_has_one_line(site: Site) -> None:
    site.said("format: json, requests: true")
    record = site.request(traceparent=TRACE)
    router = site.metrics.router
    halves = HandoverDecision(worker_of(router, "l0"), 0, 9, 1.0, 1.0)
    record.queue_s = 0.5
    record.place(10.5, Decision(worker_of(router, "s0"), Reason.HANDOVER, 1.25, handover=halves))
    record.prefilled_at = 11.0
    record.saw_tokens(11.25, site.metrics)
    record.saw_tokens(11.5, site.metrics, 3)
    record.sent_bytes = 700
    record.close(12.0, site.metrics, "chat/completions", 200, None)
    assert site.told() == {
        "time": "1970-01-01T00:00:00.250000Z", "event": "request", "id": "req-1",
        "trace": "4bf92f3577b34da6a3ce929d0e0e4736", "route": "chat/completions",
        "reason": "handover", "worker": "s0", "prefill_worker": "l0", "status": 200,
        "outcome": "done", "model": "m", "tenant": None, "class": "short", "stream": True,
        "body_bytes": record.ask.body_bytes if record.ask else None, "prompt_tokens": 120,
        "counted": True, "sent_bytes": 700, "output_tokens": 4, "queue_ms": 500.0,
        "prefill_ms": 500.0, "transfer_ms": 250.0, "decode_ms": 750.0, "ttft_ms": 1250.0,
        "predicted_ttft_ms": 1250.0, "total_ms": 2000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "done"), (404, "refused"), (499, "client_gone"), (502, "failed")],
)
def test_what_came_of_it(site: Site, status: int, outcome: str) -> None:
    site.said("format: json, requests: true")
    site.request().close(12.0, site.metrics, "completions", status, Reason.NO_WORKER)
    told = site.told()
    assert (told["outcome"], told["worker"], told["ttft_ms"]) == (outcome, None, None)


@pytest.mark.parametrize(
    ("rank", "batch", "size"),
    [(Rank.INTERACTIVE, False, None), (Rank.BATCH, False, "batch"), (Rank.STANDARD, True, "batch")],
)
def test_an_unread_request_is_told(site: Site, rank: Rank, batch: bool, size: str | None) -> None:
    site.said("format: json, requests: true")
    record = site.request()
    assert record.request is not None
    head, record.ask = record.request.head, None
    head.tenant, head.batch = Tenant(TenantSpec("team-a", rank)), batch
    record.close(12.0, site.metrics, "chat/completions", 429, Reason.LIMITED)
    told = site.told()
    assert (told["reason"], told["tenant"], told["class"]) == ("limited", "team-a", size)
    nothing = ("model", "stream", "body_bytes", "prompt_tokens", "counted")
    assert {name: told[name] for name in nothing} == dict.fromkeys(nothing)


def test_prompts_are_in_it_only_where_the_file_says_so(site: Site) -> None:
    for settings, there in (("", False), (", prompts: true", True), ("", False)):
        site.said(f"format: json, requests: true{settings}")
        site.request(b"a prompt of mine").close(12.0, site.metrics, "completions", 200, None)
        assert ("a prompt of mine" in site.lines()[-1]) is there
    site.said("prompts: true")  # without the lines there is nowhere for them to be
    assert not site.metrics.keeps_prompts


def test_text_has_one_line_too_whatever_clients_send(site: Site) -> None:
    site.said("requests: true")
    record = site.request()
    assert record.request is not None
    record.request.id = b"a\nlevel=CRITICAL \x1b[31m"
    record.close(12.0, site.metrics, "completions", 200, None)
    [line] = site.lines()
    assert "REQUEST id=a\\nlevel=CRITICAL \\x1b[31m " in line
    assert "status=200" in line
    assert one_line("h\u00e9 \u2028") == "h\u00e9 \\u2028"


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_routers_own_lines_have_no_secrets(site: Site, form: str) -> None:
    site.said(f"format: {form}")
    site.logs.take_over("[3] ")
    ours = logging.getLogger("proxy.telemetry.test")
    ours.info("sent %s", "Bearer very-secret-key")
    ours.debug("not this one")
    try:
        raise ValueError("very-secret-key")
    except ValueError:
        ours.exception("it failed")
    text = "\n".join(site.lines())
    assert "very-secret-key" not in text
    assert "sent Bearer ***" in text
    assert "ValueError: ***" in text
    assert "not this one" not in text
    if form == "json":
        first = json.loads(site.lines()[0])
        assert (first["level"], first["logger"]) == ("info", "proxy.telemetry.test")
        assert first["process"] == "[3]"
    else:
        assert "INFO [3] sent" in text


def test_keys_that_stand_elsewhere_are_cut_out_too(site: Site) -> None:
    config = parse(FLEET % "", "fleet.yaml")
    site.logs.reconfigure(config, ["its-key", "its-key-of-old", "a"])
    site.logs.take_over()
    logging.getLogger("proxy.telemetry.test").info("met a thing with its-key, its-key-of-old")
    assert site.lines()[0].endswith("met a thing with ***, ***")


def test_others_write_again_once_it_is_closed(site: Site) -> None:
    before = logging.getLogger().handlers[:]
    site.logs.take_over()
    assert logging.getLogger().handlers != before
    site.logs.close()
    assert logging.getLogger().handlers == before


async def test_levels_change_at_run_time_until_the_file_is_read_again(site: Site) -> None:
    site.logs.take_over()
    app = FastAPI()
    app.include_router(log_routes(site.logs), prefix="/admin")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as api:
        assert (await api.get("/admin/logs")).json()["levels"][""] == "info"
        wanted = {"levels": {"": "error", "proxy.health.probe": "debug"}, "requests": True}
        shown = (await api.put("/admin/logs", json=wanted)).json()
        assert shown["requests"]
        assert shown["levels"] | {"": "error", "proxy.health.probe": "debug"} == shown["levels"]
        assert logging.getLogger("proxy.health.probe").isEnabledFor(logging.DEBUG)
        for bad in (
            {"levels": {"": "loud"}},
            {"levels": {"uvicorn": "debug"}},
            {"prompts": True},
            {"nonsense": 1},
        ):
            assert (await api.put("/admin/logs", json=bad)).status_code == 422
        site.said("")
        shown = (await api.get("/admin/logs")).json()
        assert not shown["requests"]
        assert shown["levels"][""] == "info"
        assert "proxy.health.probe" not in shown["levels"]
