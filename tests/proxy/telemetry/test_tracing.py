"""Traces across the router and both workers of a hand-over, as a collector gets them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from proxy.config.telemetry import TracingConfig
from proxy.core.model.types import Reason
from proxy.errors import ProxyError
from proxy.http.request import Request, RequestHead
from proxy.http.trace import Trace, id_in
from proxy.setup.app import App
from proxy.telemetry import tracing
from proxy.telemetry.tracing import LoggedExporter, Tracing
from proxy.wire.exchange.request_record import RequestRecord
from tests.collector import Collector, Span
from tests.proxy.metrics.scraped import scraped
from tests.proxy.running import ask, entry, running, serving, write_fleet
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import eventually

pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
SpanExportResult = pytest.importorskip("opentelemetry.sdk.trace.export").SpanExportResult

DEADLINE_S = 30.0
ROLES = ("prefill", "decode")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


def by_id(spans: Iterable[Span]) -> dict[str, tuple[str, str, str]]:
    return {span.id: (span.name, span.trace, span.parent) for span in spans}


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    kv, workers = Kv(), [FakeWorker("p0"), FakeWorker("d0")]
    for role, worker in zip(ROLES, workers, strict=True):
        worker.always(kv.worker(worker, role))
    async with serving(*workers):
        yield workers


@asynccontextmanager
async def router(folder: Path, workers: list[FakeWorker], **settings: object) -> AsyncIterator[App]:
    """Run a router before both workers, with these settings of tracing if any."""
    source = write_fleet(
        folder,
        *(entry(worker, role=role) for role, worker in zip(ROLES, workers, strict=True)),
        router={"tracing": settings} if settings else {},
        transfer="nixl",
        routing={"disaggregate_above": 1},
    )
    async with running(source) as app:
        await eventually(lambda: app.metrics.handovers.warmups == {"done": 1}, within=DEADLINE_S)
        yield app


def handed_over(*headers: bytes) -> bytes:
    return chat("hello " * 50, *headers, stream=True)


def traceparents(worker: FakeWorker) -> list[bytes]:
    """Return the traceparents that a worker received, without warm-ups."""
    found = [
        re.findall(rb"(?im)^traceparent: (\S+)\r$", call.head)
        for call in worker.served
        if b"hello" in call.body
    ]
    assert all(len(values) <= 1 for values in found)
    return [values[0] for values in found if values]


async def test_handover_is_one_trace(
    tmp_path: Path, collector: Collector, workers: list[FakeWorker]
) -> None:
    async with router(tmp_path, workers, endpoint=collector.url, sample=0) as app:
        # The client's sampling decision has precedence.
        sampled = handed_over(f"traceparent: 00-{TRACE}-{SPAN}-01".encode())
        assert [await ask(app, sampled), await ask(app, handed_over())] == [200, 200]
        page = scraped(app.metrics, openmetrics=True)
        [exemplar] = re.findall(r'\} \d+ # \{trace_id="(\w+)"\} [\d.]+ [\d.]+\n', page)
        assert exemplar == TRACE
        assert exemplar not in scraped(app.metrics)  # the text format has no exemplars
        families = list(text_string_to_metric_families(page))
        assert any(s.exemplar for family in families for s in family.samples)
    tree = by_id(collector.spans)
    assert {trace for _, trace, _ in tree.values()} == {TRACE}
    ids = {name: span for span, (name, _, _) in tree.items()}
    parents = {name: parent for name, _, parent in tree.values()}
    root = ids["router chat/completions"]
    assert parents == {
        "router chat/completions": SPAN, "queue": root, "prefill leg": root, "decode leg": root,
        "transfer": ids["decode leg"], "decode": ids["decode leg"],
    }  # fmt: skip
    assert {span.service for span in collector.spans} == {"vllm-sched-router"}
    prefill, decode = traceparents(workers[0]), traceparents(workers[1])
    assert prefill[0] == f"00-{TRACE}-{ids['prefill leg']}-01".encode()
    assert decode[0] == f"00-{TRACE}-{ids['decode leg']}-01".encode()
    # An unsampled request also has a trace ID.
    assert prefill[1].endswith(b"-00")
    assert id_in(prefill[1]) == id_in(decode[1]) != TRACE
    for span in collector.spans:
        assert 0 < span.began_ns <= span.ended_ns


async def test_trace_headers_pass_without_tracing(
    tmp_path: Path, workers: list[FakeWorker]
) -> None:
    sent = f"00-{TRACE}-{SPAN}-00".encode()
    async with router(tmp_path, workers) as app:
        assert await ask(app, handed_over(b"traceparent: " + sent, b"tracestate: a=b")) == 200
        assert await ask(app, handed_over()) == 200
    assert traceparents(workers[0]) == traceparents(workers[1]) == [sent]


async def test_unreachable_collector_does_not_affect_requests(
    tmp_path: Path, workers: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        endpoint = "http://127.0.0.1:9/v1/traces"
        async with router(tmp_path, workers, endpoint=endpoint, sample=1.0) as app:
            assert [await ask(app, handed_over()) for _ in range(3)] == [200] * 3
            await asyncio.to_thread(app.tracing._processor.force_flush)  # type: ignore[union-attr]
    [line] = logged(caplog)
    assert line.startswith(f"router.tracing: {endpoint} does not accept spans")
    assert "Connection refused" in line


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    # pytest also captures OpenTelemetry's own lines, which do not reach the router's log.
    return [text for name, _, text in caplog.record_tuples if name == tracing.__name__]


def test_collector_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.telemetry.tracing")
    results = [SpanExportResult[name] for name in ("FAILURE", "FAILURE", "SUCCESS", "SUCCESS")]

    class Exporter:
        def export(self, _: object) -> object:
            logging.getLogger("opentelemetry.exporter.otlp").error("code: 404")
            return results.pop(0)

        def shutdown(self) -> None: ...

    exporter = LoggedExporter(Exporter(), "http://c/v1/traces")
    for _ in range(4):
        exporter.export([])
    exporter.shutdown()
    assert logged(caplog) == [
        "router.tracing: http://c/v1/traces does not accept spans, which are dropped until it "
        "does: code: 404",
        "router.tracing: http://c/v1/traces accepts spans again",
    ]


async def test_refused_request_is_traced(
    tmp_path: Path, collector: Collector, workers: list[FakeWorker]
) -> None:
    async with router(tmp_path, workers, endpoint=collector.url, sample=1) as app:
        assert await ask(app, chat(model="unknown")) == 404
    assert {name for name, _, _ in by_id(collector.spans).values()} == {"router chat/completions"}


@pytest.mark.parametrize(
    ("header", "parent", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", int(SPAN, 16), True),
        (f"00-{TRACE}-{SPAN}-00", int(SPAN, 16), False),
        (f"cc-{TRACE}-{SPAN}-09", int(SPAN, 16), True),
        (f"ff-{TRACE}-{SPAN}-01", None, True),
        (f"00-{'0' * 32}-{SPAN}-01", None, True),
        (f"00-{TRACE}-{'0' * 16}-01", None, True),
        (f"00-{TRACE.upper()}-{SPAN}-01", None, True),
        ("", None, True),
        (f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01", None, True),
    ],
)
def test_invalid_traceparent_is_ignored(header: str, parent: int | None, sampled: bool) -> None:
    trace = Trace.begin(header.encode(), sample=True)
    assert (trace.parent, trace.sampled) == (parent, sampled)
    assert (trace.id == TRACE) == (parent is not None)


def test_sample_is_the_traced_share() -> None:
    chances = iter([0.05, 0.15])
    tracing_ = Tracing(TracingConfig(endpoint="http://c/v1/traces"), chance=lambda: next(chances))
    assert [tracing_.begin(None).sampled for _ in range(2)] == [True, False]
    tracing_.close()


@pytest.mark.parametrize(
    ("queue_s", "placed_at", "reason"),
    [(2.0, None, Reason.FLEET_FULL), (0.5, 17.0, Reason.RETRY)],
    ids=["left the queue", "failed worker"],  # the time on that worker is no waiting time
)
def test_queue_span_is_the_time_in_the_queue(
    queue_s: float, placed_at: float | None, reason: Reason
) -> None:
    record = RequestRecord()
    record.request = Request(RequestHead(), b"")
    trace = record.request.trace = Trace.begin(None, sample=True)
    record.started, record.queue_s, record.placed_at = 10.0, queue_s, placed_at
    found = tracing.spans_of(record, trace, 18.0, "completions", reason)
    spans = {name: (start, end) for name, _, _, start, end, _ in found}
    assert "router completions" in spans
    start, end = spans["queue"]
    assert end - start == queue_s * 1e9


def test_leg_begins_within_its_request_when_the_export_is_late() -> None:
    record = RequestRecord()
    record.request = Request(RequestHead(), b"")
    trace = record.request.trace = Trace.begin(None, sample=True)
    record.started = time.monotonic()
    trace.leg("w", "short")
    now = time.monotonic()
    time.sleep(0.05)
    found = [*tracing.spans_of(record, trace, now, "completions", Reason.ONLY_CHOICE)]
    request, serve = (span for span in found if span.name != "queue")
    assert request.start_ns - 10**6 < serve.start_ns <= serve.end_ns <= request.end_ns


def test_missing_extra_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ProxyError, match=r"vllm-sched\[otel\]"):
        Tracing(TracingConfig(endpoint="http://c/v1/traces"))
    assert tracing.MISSING.startswith("router.tracing")
