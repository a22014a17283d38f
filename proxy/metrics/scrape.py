"""What a scrape shows: the counts of `Metrics`, and the state of the router at that moment."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from prometheus_client import ProcessCollector

from proxy.core.fleet.breaker import BUSY, Breaker
from proxy.core.fleet.ejection import key_of
from proxy.core.fleet.slots import share_taken
from proxy.core.fleet.worker import Worker
from proxy.metrics import phases
from proxy.metrics.exposition import SLICE, Family, MetricsPage
from proxy.metrics.histogram import Histogram

if TYPE_CHECKING:
    from proxy.metrics.registry import Metrics

VERSION = metadata.version("vllm-sched")
WORKER = ("worker", "role", "model")

BUILD = Family("proxy_build_info", "gauge", "The router's version; always 1.", ("version",))
REQUESTS = Family(
    "proxy_requests",
    "counter",
    "Requests answered, by where they went, why, and the status the client got.",
    ("route", "model", "worker", "reason", "status", "class"),
)
RETRIES = Family(
    "proxy_retries",
    "counter",
    "Requests that failed on a worker before its first byte and were sent elsewhere.",
    ("worker", "why"),
)
DECISIONS = Family(
    "proxy_decisions", "counter", "Decisions of the routing rule.", ("model", "reason")
)
NO_ROOM = Family(
    "proxy_connects_without_room",
    "counter",
    "Connections to workers that this machine had no files, ports or memory for.",
)
PROCESSES = Family("proxy_processes", "gauge", "Processes of the router that serve.")
RESTARTS = Family(
    "proxy_process_restarts",
    "counter",
    "Processes of the router that ended and were begun again.",
)
QUEUE_REQUESTS = Family("proxy_queue_requests", "gauge", "Requests that wait in the router.")
QUEUE_LIMIT = Family(
    "proxy_queue_limit_requests", "gauge", "Requests that may wait in the router at most."
)
QUEUE_BYTES = Family("proxy_queue_bytes", "gauge", "Bytes of the bodies that wait in the router.")
LOG_DROPPED = Family(
    "proxy_log_lines_dropped",
    "counter",
    "Lines of the log not written, because whoever reads it is too slow, or its disk full.",
)
LOOP_LAG = Family(
    "proxy_loop_lag_seconds",
    "histogram",
    "How late the router's event loop is, asked 5 times a second.",
)
CLIENTS = Family("proxy_client_connections", "gauge", "Open connections of clients.")
UPSTREAM = Family(
    "proxy_upstream_connections", "gauge", "Open connections to workers.", ("worker", "state")
)
DISCOVERY_UP = Family(
    "proxy_discovery_up", "gauge", "Whether it is told who is in a pool.", ("name",)
)
DISCOVERED = Family("proxy_discovery_workers", "gauge", "Workers found in a pool.", ("name",))
BYTES_PER_TOKEN = Family(
    "proxy_bytes_per_token",
    "gauge",
    "Bytes of prompt text per token, learnt from usage and counts.",
    ("model", "route"),
)

TTFT = Family(
    "proxy_ttft_seconds",
    "histogram",
    "From a request's arrival to its first token, wait in the router included.",
    ("pool", "model", "class"),
)
PREDICTED_TTFT = Family(
    "proxy_predicted_ttft_seconds",
    "histogram",
    "The same as predicted when it was placed, for requests that had a first token.",
    ("pool", "model", "class"),
)
TPOT = Family(
    "proxy_time_per_output_token_seconds",
    "histogram",
    "Mean time between a stream's tokens, of each request that had two.",
    ("pool", "model", "class"),
)
DURATIONS = Family(
    "proxy_request_duration_seconds",
    "histogram",
    "From a request's arrival to the last byte of its answer.",
    ("pool", "route", "class"),
)
WAITS = Family(
    "proxy_queue_wait_seconds",
    "histogram",
    "Time in the router's queue.",
    ("pool", "model", "class"),
)
GAPS = Family(
    "proxy_inter_token_latency_seconds",
    "histogram",
    "Time between two events of a stream, as they came from the worker.",
    ("pool", "class"),
)


HANDOVER_DECISIONS = Family(
    "proxy_handover_decisions",
    "counter",
    "Requests by whether they were handed over from a prefill to a decode worker, or why not.",
    ("model", "why"),
)
HANDOVERS = Family(
    "proxy_handovers",
    "counter",
    "Hand-overs by how far they got, and blocks that were released or left to expire.",
    ("outcome",),
)
WARMUPS = Family(
    "proxy_handover_warmups",
    "counter",
    "Connections between prefill and decode workers that the router had made.",
    ("outcome",),
)
PREFILL_LEGS = Family(
    "proxy_prefill_legs", "counter", "Prefills of hand-overs that a worker has done.", ("worker",)
)
BARS = Family(
    "proxy_handover_bars",
    "counter",
    "Times that two workers were given no hand-over for a while, because some had failed in a row.",
    ("prefill", "decode"),
)
TRANSFER_TOKENS = Family(
    "proxy_transfer_tokens", "counter", "Prompt tokens handed over, estimated.", ("model",)
)
TRANSFER_BYTES = Family(
    "proxy_transfer_bytes",
    "counter",
    "Bytes of KV cache that a worker has fetched or sent, where it says so.",
    ("worker", "role"),
)
PREFILL_LEG = Family(
    "proxy_prefill_leg_seconds", "histogram", "From a prefill's start to its answer.", ("model",)
)
TRANSFER = Family(
    "proxy_transfer_seconds",
    "histogram",
    "From a decode leg's start to its first token, less the time of a step.",
    ("model",),
)
PREDICTED_TRANSFER = Family(
    "proxy_predicted_transfer_seconds",
    "histogram",
    "The same as predicted when it was placed.",
    ("model",),
)


def gauge(name: str, text: str) -> Family:
    """Describe a gauge that each worker has."""
    return Family(f"proxy_worker_{name}", "gauge", text, WORKER)


INFLIGHT = gauge("inflight_requests", "Requests charged to the worker.")
PREFILL = gauge("prefill_tokens", "Prompt tokens charged that it has yet to prefill.")
DECODE = gauge("decode_tokens", "Output tokens charged that it has yet to write.")
KV = gauge("kv_tokens", "Tokens that the requests charged to it may hold in its cache.")
PINNED = gauge("held_prompts", "Prompts it has prefilled that decode workers are yet to fetch.")
KV_USAGE = gauge("kv_usage_ratio", "How full its KV cache is, as it says itself.")
SEATS = gauge(
    "seats_taken_ratio",
    "Share of the sequences that it runs at once that are there; 0 where nothing tells how many.",
)
KV_CAPACITY = gauge("kv_capacity_tokens", "Tokens that its KV cache holds, where it tells.")
UP = gauge("up", "Whether its probes succeed, and its own model is among those that it lists.")
BREAKER = gauge("breaker_open", "Whether requests are kept from it because others failed.")
BREAKER_STATE = Family(
    "proxy_worker_breaker_state",
    "gauge",
    "How its breaker is, if not closed: busy where that is what the worker says, else open, or "
    "half_open, when one request may pass on trial. Always 1.",
    (*WORKER, "state"),
)
OPENINGS = Family(
    "proxy_breaker_openings",
    "counter",
    "Times that its breaker opened, because it failed or was busy; not those that a trial failed.",
    (*WORKER, "why"),
)
PANIC = Family(
    "proxy_pool_panic",
    "gauge",
    "Whether breakers are ignored, because fewer of a model's workers than panic_threshold are "
    "well; pool: serve, or prefill for workers that do nothing else.",
    ("model", "pool"),
)
PANICS = Family(
    "proxy_pool_panics",
    "counter",
    "Times that the breakers of a model's workers began to be ignored.",
    ("model", "pool"),
)
DRAINING = gauge("draining", "Whether it is given nothing new.")

process = ProcessCollector(registry=None)


async def write_page(metrics: Metrics, openmetrics: bool = False) -> tuple[bytes, str]:
    """Return the page and its content type.

    The page is written in slices, between which the event loop serves streams.
    """
    page, pieces = MetricsPage(openmetrics=openmetrics), []
    for piece in slices(metrics, page):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces), page.kind


def slices(metrics: Metrics, page: MetricsPage) -> Iterator[bytes]:
    """Write all families piece by piece; meanwhile what they tell of may change."""
    _name_models(metrics)
    page.values(BUILD, [((VERSION,), 1)])
    for _ in _requests(page, metrics):
        yield b""
    _counts(page, metrics)
    _histograms(page, metrics)
    _handovers(page, metrics)
    yield b""
    _workers(page, list(metrics.router.fleet))
    _panics(page, metrics)
    yield b""
    _router(page, metrics)
    metrics.tenants.show(page)
    _process(page)
    yield b""
    yield from page.slices()


def _name_models(metrics: Metrics) -> None:
    # Before anything is told: to make room for new ones may drop what was counted of others.
    for model in {model for model, _ in metrics.router.decisions}:
        metrics.model_label(model)


def _requests(page: MetricsPage, metrics: Metrics) -> Iterator[None]:
    requests: Counter[tuple[str, ...]] = Counter()
    for number, (key, series) in enumerate([*metrics.requests.items()]):
        route, model, worker, _, reason, status, size = key
        requests[route, model, worker, reason, str(status), size] += series.count
        if number % SLICE == SLICE - 1:
            yield
    page.values(REQUESTS, requests.items())


def _counts(page: MetricsPage, metrics: Metrics) -> None:
    page.values(RETRIES, metrics.retries.items())
    decisions: Counter[tuple[str, str]] = Counter()
    for (model, reason), count in metrics.router.decisions.items():
        decisions[metrics.model_label(model), reason.value] += count
    page.values(DECISIONS, decisions.items())


def _histograms(page: MetricsPage, metrics: Metrics) -> None:
    tables: tuple[tuple[Family, Mapping[tuple[str, ...], Histogram]], ...] = (
        (TTFT, metrics.ttft),
        (PREDICTED_TTFT, metrics.predicted),
        (TPOT, metrics.tpot),
        (DURATIONS, metrics.durations),
        (WAITS, metrics.waits),
        (GAPS, metrics.gaps),
    )
    for family, table in tables:
        page.histograms(family, table.items())
    page.histograms(LOOP_LAG, [((), metrics.loop_lag)])
    phases.show(page, metrics.phases)
    metrics.unseen.show(page)


def _handovers(page: MetricsPage, metrics: Metrics) -> None:
    found, fleet = metrics.handovers, metrics.router.fleet
    decisions: Counter[tuple[str, str]] = Counter()
    for (model, why), count in metrics.router.handovers.items():
        decisions[metrics.model_label(model), why] += count
    page.values(HANDOVER_DECISIONS, decisions.items())
    page.values(HANDOVERS, (((how,), count) for how, count in found.ends.items()))
    page.values(WARMUPS, (((how,), count) for how, count in found.warmups.items()))
    found.forget({worker.name for worker in fleet})
    page.values(BARS, found.bars.items())
    page.values(PREFILL_LEGS, (((worker,), count) for worker, count in found.legs.items()))
    page.values(TRANSFER_TOKENS, (((model,), count) for model, count in found.tokens.items()))
    told = [
        (w, w.gauges.extra["kv_bytes"]) for w in fleet if w.gauges and "kv_bytes" in w.gauges.extra
    ]
    page.values(TRANSFER_BYTES, (((w.name, w.role.value), count) for w, count in told))
    for family, table in (
        (PREFILL_LEG, found.prefills),
        (TRANSFER, found.transfers),
        (PREDICTED_TRANSFER, found.predicted),
    ):
        page.histograms(family, (((model,), seen) for model, seen in table.items()))


def _workers(page: MetricsPage, workers: list[Worker]) -> None:
    rows = [((worker.name, worker.role.value, worker.model), worker) for worker in workers]
    page.values(INFLIGHT, ((labels, w.requests) for labels, w in rows))
    page.values(PREFILL, ((labels, w.prefill_tokens) for labels, w in rows))
    page.values(DECODE, ((labels, w.decode_tokens) for labels, w in rows))
    page.values(KV, ((labels, w.kv_tokens) for labels, w in rows))
    page.values(PINNED, ((labels, w.pinned) for labels, w in rows))
    page.values(KV_USAGE, ((labels, w.gauges.kv_usage) for labels, w in rows if w.gauges))
    now = time.monotonic()
    page.values(SEATS, ((labels, share_taken(w, now)) for labels, w in rows if w.gauges))
    page.values(KV_CAPACITY, ((labels, w.kv_capacity) for labels, w in rows if w.kv_capacity))
    page.values(UP, ((labels, w.up and not w.strays) for labels, w in rows))
    page.values(BREAKER, ((labels, w.barred) for labels, w in rows))
    kept_out = [(labels, w.breaker) for labels, w in rows if not w.breaker.closed]
    page.values(BREAKER_STATE, (((*labels, _state(b, now)), 1) for labels, b in kept_out))
    opened = ((labels, why, n) for labels, w in rows for why, n in w.breaker.opened.items())
    page.values(OPENINGS, (((*labels, why), n) for labels, why, n in opened))
    page.values(DRAINING, ((labels, w.draining) for labels, w in rows))


def _panics(page: MetricsPage, metrics: Metrics) -> None:
    fleet = metrics.router.fleet
    ejections = fleet.ejections
    pools = {key: (key[0], "prefill" if key[1] else "serve") for key in map(key_of, fleet)}
    page.values(PANIC, ((labels, key in ejections.panics) for key, labels in pools.items()))
    started = ejections.started
    page.values(PANICS, ((labels, started.get(key, 0)) for key, labels in pools.items()))


def _state(breaker: Breaker, now: float) -> str:
    # On trial, too: with few requests one that is busy mostly is, and it is no failure then either.
    return BUSY if breaker.busy else breaker.state(now).value


def _router(page: MetricsPage, metrics: Metrics) -> None:
    queue = metrics.router.queue
    page.values(PROCESSES, [((), 1)])
    page.values(RESTARTS, [((), 0)])  # of a router of one process somebody else takes care
    page.values(QUEUE_REQUESTS, [((), len(queue))])
    page.values(QUEUE_LIMIT, [((), queue.most)])
    page.values(QUEUE_BYTES, [((), queue.bytes)])
    page.values(CLIENTS, [((), metrics.client_connections)])
    page.values(NO_ROOM, [((), metrics.connects_failed)])
    page.values(LOG_DROPPED, [((), metrics.log_lines_dropped())])
    connections = metrics.upstream_connections()
    page.values(UPSTREAM, (((worker, state), count) for worker, state, count in connections))
    found = list(metrics.discovered())
    page.values(DISCOVERY_UP, (((name,), works) for name, works, _ in found))
    page.values(DISCOVERED, (((name,), count) for name, _, count in found))
    if metrics.batches is not None:
        metrics.batches.show(page)
    page.values(BYTES_PER_TOKEN, _learnt(metrics))


def _learnt(metrics: Metrics) -> Iterator[tuple[tuple[str, str], float]]:
    for route, model in dict.fromkeys((key[0], key[1]) for key in metrics.requests):
        found = metrics.router.sizer.prior(model, route).bytes_per_token
        if found is not None:
            yield (model, route), round(found, 3)


def _process(page: MetricsPage) -> None:
    for family in process.collect():
        kind: Literal["counter", "gauge"] = "counter" if family.type == "counter" else "gauge"
        rows = [((), sample.value) for sample in family.samples]
        page.values(Family(family.name, kind, family.documentation), rows)
