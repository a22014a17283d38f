"""Logs of requests and of the router, without secrets."""

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
from tests.proxy.core.making import LONG, SHORT, make_info, router_of, spec, worker_of

FLEET = """
model: tiny
workers: [{name: w0, url: "http://127.0.0.1:9001", api_key: very-secret-key}]
router: {logs: {%s}}
"""
TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Site:
    """A router's metrics and a log file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metrics = Metrics(router_of(spec("s0", SHORT), spec("l0", LONG)))
        self.fd = os.open(file, os.O_WRONLY | os.O_CREAT)
        self.logs = Logs(
            parse(FLEET % "", "fleet.yaml"), self.metrics, LogWriter(self.fd), lambda: 0.25
        )

    def configure(self, settings: str) -> None:
        self.logs.reconfigure(parse(FLEET % settings, "fleet.yaml"))

    def request(self, body: bytes = b"{}", **headers: bytes) -> RequestRecord:
        record, head = RequestRecord(), RequestHead()
        head.special.update({name.encode(): value for name, value in headers.items()})
        request = Request(head, body)
        request.id = b"req-1"
        record.begin(10.0, request, self.metrics)
        record.info = make_info(prompt=120)
        return record

    def lines(self) -> list[str]:
        assert self.logs.writer.flush(30.0)
        return self.file.read_text().splitlines()

    def only_entry(self) -> dict[str, Any]:
        [line] = self.lines()
        return dict(json.loads(line))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Log to a file; restore Python's logging afterwards."""
    site, root = Site(tmp_path / "log"), logging.getLogger()
    level = root.level
    yield site
    site.logs.close()
    os.close(site.fd)
    root.setLevel(level)


def test_requests_are_not_logged_by_default(site: Site) -> None:
    site.request().close(12.0, site.metrics, "completions", 200, None)
    assert site.lines() == []
    assert site.metrics.at_end == ()


def test_request_has_one_line(site: Site) -> None:
    site.configure("format: json, requests: true")
    record = site.request(traceparent=TRACE)
    router = site.metrics.router
    handover = HandoverDecision(worker_of(router, "l0"), 0, 9, 1.0, 1.0)
    record.queue_s = 0.5
    record.place(10.5, Decision(worker_of(router, "s0"), Reason.HANDOVER, 1.25, handover=handover))
    record.prefilled_at = 11.0
    record.record_tokens(11.25, site.metrics)
    record.record_tokens(11.5, site.metrics, 3)
    record.sent_bytes = 700
    record.close(12.0, site.metrics, "chat/completions", 200, None)
    assert site.only_entry() == {
        "time": "1970-01-01T00:00:00.250000Z", "event": "request", "id": "req-1",
        "trace": "4bf92f3577b34da6a3ce929d0e0e4736", "route": "chat/completions",
        "reason": "handover", "worker": "s0", "prefill_worker": "l0", "status": 200,
        "outcome": "done", "model": "m", "tenant": None, "class": "short", "stream": True,
        "body_bytes": record.info.body_bytes if record.info else None, "prompt_tokens": 120,
        "session": None, "turn": None,
        "counted": True, "sent_bytes": 700, "output_tokens": 4, "queue_ms": 500.0,
        "prefill_ms": 500.0, "transfer_ms": 250.0, "decode_ms": 750.0, "ttft_ms": 1250.0,
        "predicted_ttft_ms": 1250.0, "total_ms": 2000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "done"), (404, "refused"), (499, "client_gone"), (502, "failed")]
)
def test_outcome_depends_on_the_status(site: Site, status: int, outcome: str) -> None:
    site.configure("format: json, requests: true")
    site.request().close(12.0, site.metrics, "completions", status, Reason.NO_WORKER)
    found = site.only_entry()
    assert (found["outcome"], found["worker"], found["ttft_ms"]) == (outcome, None, None)


@pytest.mark.parametrize(
    ("rank", "batch", "size"),
    [(Rank.INTERACTIVE, False, None), (Rank.BATCH, False, "batch"), (Rank.STANDARD, True, "batch")],
)
def test_request_refused_unread_is_logged(
    site: Site, rank: Rank, batch: bool, size: str | None
) -> None:
    site.configure("format: json, requests: true")
    record = site.request()
    assert record.request is not None
    head, record.info = record.request.head, None
    head.tenant, head.batch = Tenant(TenantSpec("team-a", rank)), batch
    record.close(12.0, site.metrics, "chat/completions", 429, Reason.LIMITED)
    found = site.only_entry()
    assert (found["reason"], found["tenant"], found["class"]) == ("limited", "team-a", size)
    unknown = ("model", "stream", "body_bytes", "prompt_tokens", "counted")
    assert {name: found[name] for name in unknown} == dict.fromkeys(unknown)


def test_prompts_are_logged_only_if_configured(site: Site) -> None:
    for settings, there in (("", False), (", prompts: true", True), ("", False)):
        site.configure(f"format: json, requests: true{settings}")
        site.request(b"a private prompt").close(12.0, site.metrics, "completions", 200, None)
        assert ("a private prompt" in site.lines()[-1]) is there
    site.configure("prompts: true")  # without request lines, prompts are not kept
    assert not site.metrics.keeps_prompts


def test_text_format_escapes_control_characters(site: Site) -> None:
    site.configure("requests: true")
    record = site.request()
    assert record.request is not None
    record.request.id = b"a\nlevel=CRITICAL \x1b[31m"
    record.close(12.0, site.metrics, "completions", 200, None)
    [line] = site.lines()
    assert "REQUEST id=a\\nlevel=CRITICAL \\x1b[31m " in line
    assert "status=200" in line
    assert one_line("h\u00e9 \u2028") == "h\u00e9 \\u2028"


@pytest.mark.parametrize("form", ["json", "text"])
def test_log_lines_contain_no_secrets(site: Site, form: str) -> None:
    site.configure(f"format: {form}")
    site.logs.take_over("[3] ")
    logger = logging.getLogger("proxy.telemetry.test")
    logger.info("sent %s", "Bearer very-secret-key")
    logger.debug("not this one")
    try:
        raise ValueError("very-secret-key")
    except ValueError:
        logger.exception("it failed")
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


def test_keys_from_other_files_are_hidden_and_close_restores_other_handlers(site: Site) -> None:
    config = parse(FLEET % "", "fleet.yaml")
    site.logs.reconfigure(config, ["its-key", "its-key-of-old", "a"])
    before = logging.getLogger().handlers[:]
    site.logs.take_over()
    assert logging.getLogger().handlers != before
    logging.getLogger("proxy.telemetry.test").info("sent its-key, its-key-of-old")
    assert site.lines()[0].endswith("sent ***, ***")
    site.logs.close()
    assert logging.getLogger().handlers == before


async def test_levels_set_at_run_time_hold_until_a_reload(site: Site) -> None:
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
        for invalid in (
            {"levels": {"": "loud"}},
            {"levels": {"uvicorn": "debug"}},
            {"prompts": True},
        ):
            assert (await api.put("/admin/logs", json=invalid)).status_code == 422
        site.configure("")
        shown = (await api.get("/admin/logs")).json()
        assert not shown["requests"]
        assert shown["levels"][""] == "info"
        assert "proxy.health.probe" not in shown["levels"]
