"""Traces across the router and both workers of a hand-over, as a collector gets them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from proxy.config import load, parse
from proxy.config.telemetry import TracingConfig
from proxy.core.model.types import Reason
from proxy.errors import ConfigError, ProxyError
from proxy.http.request import Request, RequestHead
from proxy.http.trace import Trace, id_in
from proxy.setup.app import App
from proxy.telemetry import tracing
from proxy.telemetry.tracing import Tracing
from proxy.wire.exchange.request_record import RequestRecord
from tests.collector import Collector, Span
from tests.proxy.metrics.scraped import scraped
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import eventually

pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

DEADLINE_S = 30.0
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Start a collector."""
    with Collector() as listening:
        yield listening


def by_id(spans: Iterable[Span]) -> dict[str, tuple[str, str, str]]:
    """Return the name, trace and parent of each span by ID."""
    return {span.id: (span.name, span.trace, span.parent) for span in spans}


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    """Start a prefill and a decode worker."""
    kv = Kv()
    workers = [FakeWorker("p0"), FakeWorker("d0")]
    for role, worker in zip(("prefill", "decode"), workers, strict=True):
        await worker.listen()
        worker.always(kv.worker(worker, role))
    yield workers
    for worker in workers:
        await worker.stop()


async def start_app(folder: Path, workers: list[FakeWorker], more: str) -> App:
    """Start a router before both workers."""
    roles = zip(("prefill", "decode"), workers, strict=True)
    listed = "".join(f"  - {{name: {w.name}, url: '{w.url}', role: {r}}}\n" for r, w in roles)
    source = folder / "fleet.yaml"
    source.write_text(
        f"model: tiny\nworkers:\n{listed}transfer: nixl\nrouting: {{disaggregate_above: 1}}\n"
        f"router: {{port: 0, admin: {{port: 0}}, probe: {{interval_s: 0.05}}{more}}}\n"
    )
    app = App(load(source), source)
    await app.start()
    await eventually(lambda: app.metrics.handovers.warmups == {"done": 1}, within=DEADLINE_S)
    return app


async def ask(app: App, *headers: bytes) -> int:
    """Request a stream whose prompt is handed over."""
    client = await Client.connect(app.wire.port)
    try:
        return (await client.ask(chat("hello " * 50, *headers, stream=True))).status
    finally:
        client.close()


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
    app = await start_app(
        tmp_path, workers, f", tracing: {{endpoint: '{collector.url}', sample: 0}}"
    )
    try:
        # The client's sampling decision has precedence.
        assert await ask(app, f"traceparent: 00-{TRACE}-{SPAN}-01".encode()) == 200
        assert await ask(app) == 200
        page = scraped(app.metrics, openmetrics=True)
        [exemplar] = re.findall(r'\} \d+ # \{trace_id="(\w+)"\} [\d.]+ [\d.]+\n', page)
        assert exemplar == TRACE
        assert exemplar not in scraped(app.metrics)  # the text format has no exemplars
        families = list(text_string_to_metric_families(page))
        assert any(s.exemplar for family in families for s in family.samples)
    finally:
        await app.stop()
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
    app = await start_app(tmp_path, workers, "")
    sent = f"00-{TRACE}-{SPAN}-00".encode()
    try:
        assert await ask(app, b"traceparent: " + sent, b"tracestate: a=b") == 200
        assert await ask(app) == 200
    finally:
        await app.stop()
    assert traceparents(workers[0]) == traceparents(workers[1]) == [sent]


async def test_unreachable_collector_does_not_affect_requests(
    tmp_path: Path, workers: list[FakeWorker]
) -> None:
    more = ", tracing: {endpoint: 'http://127.0.0.1:9/v1/traces', sample: 1.0}"
    app = await start_app(tmp_path, workers, more)
    try:
        assert [await ask(app) for _ in range(3)] == [200] * 3
    finally:
        await asyncio.wait_for(app.stop(), DEADLINE_S)


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


async def test_refused_request_is_traced(
    tmp_path: Path, collector: Collector, workers: list[FakeWorker]
) -> None:
    app = await start_app(
        tmp_path, workers, f", tracing: {{endpoint: '{collector.url}', sample: 1}}"
    )
    client = await Client.connect(app.wire.port)
    try:
        assert (await client.ask(chat(model="unknown"))).status == 404
    finally:
        client.close()
        await app.stop()
    assert {name for name, _, _ in by_id(collector.spans).values()} == {"router chat/completions"}


def test_request_that_left_the_queue_has_a_queue_span() -> None:
    record = RequestRecord()
    record.request = Request(RequestHead(), b"")
    record.request.trace = Trace.begin(None, sample=True)
    record.started, record.queue_s = 10.0, 2.0
    spans = {name: (start, end) for name, _, _, start, end, _ in tracing.spans_of(
        record, 12.0, "completions", Reason.FLEET_FULL
    )}  # fmt: skip
    assert set(spans) == {"router completions", "queue"}
    start, end = spans["queue"]
    assert end - start == 2_000_000_000


def test_time_on_a_failed_worker_is_not_in_the_queue_span() -> None:
    record = RequestRecord()
    record.request = Request(RequestHead(), b"")
    record.request.trace = Trace.begin(None, sample=True)
    record.started, record.queue_s, record.placed_at = 10.0, 0.5, 17.0
    spans = {name: (start, end) for name, _, _, start, end, _ in tracing.spans_of(
        record, 18.0, "completions", Reason.RETRY
    )}  # fmt: skip
    start, end = spans["queue"]
    assert end - start == 500_000_000


def test_missing_extra_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ProxyError, match=r"vllm-sched\[otel\]"):
        Tracing(TracingConfig(endpoint="http://c/v1/traces"))
    assert tracing.MISSING.startswith("router.tracing")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{endpoint: 'c:4318'}", "http://collector:4318"),
        ("{endpoint: 'http://me:secret@c/v1/traces'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{endpoint: 'http://c/v1/traces?token=secret'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{endpoint: 'http://c/v1/traces?secret'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{endpoint: 'http://c/v1/traces#secret'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{endpoint: 'http://me:pw@c/v1/traces?token=secret'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{endpoint: 'c:4318/v1/traces?token=secret'}", "http://collector:4318"),
        ("{endpoint: 'http://c/', sample: 2}", "router.tracing.sample"),
        ("{sample: 0.5}", "router.tracing.endpoint"),
    ],
)
def test_invalid_tracing_settings_are_refused(block: str, expected: str) -> None:
    text = f"model: m\nworkers: [{{name: a, url: 'http://a'}}]\nrouter: {{tracing: {block}}}"
    with pytest.raises(ConfigError) as caught:
        parse(text, "fleet.yaml")
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)
