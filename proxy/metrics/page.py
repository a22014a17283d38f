"""The metrics page: the counters of `Metrics`, and the router's state at the scrape."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Literal

from prometheus_client import ProcessCollector

from proxy.core.fleet.breaker import BUSY, Breaker
from proxy.core.fleet.ejection import pool_key_of
from proxy.core.fleet.remote_load import own_load
from proxy.core.fleet.slots import share_taken
from proxy.core.fleet.worker import Worker
from proxy.core.request.continuable import REASONS
from proxy.metrics import journal_counts, phases, replica_counts, session_counts
from proxy.metrics.exposition import SLICE_LINES, Family, MetricsPage, counter, gauge, histogram
from proxy.metrics.histogram import Histogram
from proxy.metrics.registry import Metrics

VERSION = metadata.version("vllm-sched")
WORKER = ("worker", "role", "model")

BUILD = gauge("proxy_build_info", "The router's version; always 1.", ("version",))
REQUESTS = counter(
    "proxy_requests",
    "Finished requests, by route, model, worker, reason of the decision, status and class.",
    ("route", "model", "worker", "reason", "status", "class"),
)
RETRIES = counter(
    "proxy_retries",
    "Requests that left a worker for another because it failed, was drained, or had continued a "
    "stream without its last tokens (late_tokens).",
    ("worker", "why"),
)
CONTINUED = counter(
    "proxy_continued_streams",
    "Streams that went on from another worker after this worker failed or was drained.",
    ("worker",),
)
NOT_CONTINUED = counter(
    "proxy_streams_not_continued",
    "Streams that could not be continued after their worker failed, by reason.",
    ("why",),
)
DECISIONS = counter("proxy_decisions", "Decisions of the routing rule.", ("model", "reason"))
NO_ROOM = counter(
    "proxy_connects_without_room",
    "Connections to workers that failed, and pauses in which clients had to wait, "
    "because this machine had no free files, ports or memory.",
)
PROCESSES = gauge("proxy_processes", "Router processes that serve.")
RESTARTS = counter("proxy_process_restarts", "Router processes that ended and were restarted.")
QUEUE_REQUESTS = gauge("proxy_queue_requests", "Requests in the router's queue.")
QUEUE_LIMIT = gauge(
    "proxy_queue_limit_requests", "Maximum number of requests in the router's queue."
)
QUEUE_BYTES = gauge("proxy_queue_bytes", "Bytes of request bodies in the router's queue.")
LOG_DROPPED = counter(
    "proxy_log_lines_dropped",
    "Log lines dropped because the log's reader is too slow or its disk is full.",
)
LOOP_LAG = histogram(
    "proxy_loop_lag_seconds", "Lag of the router's event loop, measured 5 times a second."
)
CLIENTS = gauge("proxy_client_connections", "Open client connections.")
UPSTREAM = gauge("proxy_upstream_connections", "Open connections to workers.", ("worker", "state"))
DISCOVERY_UP = gauge(
    "proxy_discovery_up", "1 if discovery knows the workers of the pool.", ("name",)
)
DISCOVERED = gauge("proxy_discovery_workers", "Workers discovered in a pool.", ("name",))
BYTES_PER_TOKEN = gauge(
    "proxy_bytes_per_token",
    "Bytes of prompt text per token, learned from usage and token counts.",
    ("model", "route"),
)

TTFT = histogram(
    "proxy_ttft_seconds",
    "Time from a request's arrival to its first token, including the router's queue.",
    ("pool", "model", "class"),
)
PREDICTED_TTFT = histogram(
    "proxy_predicted_ttft_seconds",
    "Time to first token as predicted at placement, for requests that had a first token.",
    ("pool", "model", "class"),
)
TPOT = histogram(
    "proxy_time_per_output_token_seconds",
    "Mean time between a stream's tokens, for requests with at least two tokens.",
    ("pool", "model", "class"),
)
DURATIONS = histogram(
    "proxy_request_duration_seconds",
    "Time from a request's arrival to the last byte of its response.",
    ("pool", "route", "class"),
)
WAITS = histogram(
    "proxy_queue_wait_seconds", "Time in the router's queue.", ("pool", "model", "class")
)
GAPS = histogram(
    "proxy_inter_token_latency_seconds",
    "Time between two events of a stream, as received from the worker.",
    ("pool", "class"),
)


HANDOVER_DECISIONS = counter(
    "proxy_handover_decisions",
    "Requests by hand-over verdict: handed over from a prefill to a decode worker, or why not.",
    ("model", "why"),
)
HANDOVERS = counter(
    "proxy_handovers",
    "Hand-overs by outcome, and KV blocks that were released or left to expire.",
    ("outcome",),
)
WARMUPS = counter(
    "proxy_handover_warmups",
    "Warm-ups of connections between prefill and decode workers, by outcome.",
    ("outcome",),
)
PREFILL_LEGS = counter(
    "proxy_prefill_legs", "Prefill legs of hand-overs that a worker completed.", ("worker",)
)
BARS = counter(
    "proxy_handover_bars",
    "Times that a pair of workers was excluded from hand-overs after consecutive failures.",
    ("prefill", "decode"),
)
TRANSFER_TOKENS = counter(
    "proxy_transfer_tokens", "Prompt tokens handed over (estimate).", ("model",)
)
TRANSFER_BYTES = counter(
    "proxy_transfer_bytes",
    "Bytes of KV cache that a worker fetched or sent, if the worker reports it.",
    ("worker", "role"),
)
PREFILL_LEG = histogram(
    "proxy_prefill_leg_seconds", "Time from the start of a prefill leg to its response.", ("model",)
)
TRANSFER = histogram(
    "proxy_transfer_seconds",
    "Time from the start of a decode leg to its first token, minus one decode step.",
    ("model",),
)
PREDICTED_TRANSFER = histogram(
    "proxy_predicted_transfer_seconds", "Transfer time as predicted at placement.", ("model",)
)


def worker_gauge(name: str, text: str) -> Family:
    return gauge(f"proxy_worker_{name}", text, WORKER)


INFLIGHT = worker_gauge("inflight_requests", "Requests that this router charged to the worker.")
PREFILL = worker_gauge(
    "prefill_tokens",
    "Prompt tokens that this router charged to the worker and that are not yet prefilled.",
)
DECODE = worker_gauge(
    "decode_tokens",
    "Output tokens that this router charged to the worker and that are not yet generated.",
)
KV = worker_gauge("kv_tokens", "KV cache tokens that this router's requests on the worker may use.")
PINNED = worker_gauge(
    "held_prompts",
    "This router's prefilled prompts whose KV blocks decode workers have not yet fetched.",
)
KV_USAGE = worker_gauge("kv_usage_ratio", "KV cache usage, as reported by a worker that is up.")
SLOTS = worker_gauge(
    "seats_taken_ratio",
    "Share of the worker's slots (max_num_seqs) in use; 0 if the number of slots is unknown.",
)
KV_CAPACITY = worker_gauge(
    "kv_capacity_tokens", "Capacity of the KV cache in tokens, if the worker reports it."
)
UP = worker_gauge(
    "up", "1 if the worker's probes succeed and the worker lists its configured model."
)
BREAKER = worker_gauge(
    "breaker_open",
    "1 if the worker gets only trial requests, because requests failed on it or it was busy; 0 "
    "while breakers are ignored.",
)
BREAKER_STATE = gauge(
    "proxy_worker_breaker_state",
    "State of a breaker that is not closed: busy if the worker reported overload, otherwise open, "
    "or half_open when one trial request may pass. Always 1.",
    (*WORKER, "state"),
)
OPENINGS = counter(
    "proxy_breaker_openings",
    "Times that the breaker opened because the worker failed or was busy; failed trials excluded.",
    (*WORKER, "why"),
)
PANIC = gauge(
    "proxy_pool_panic",
    "1 while breakers are ignored because fewer of a model's workers than panic_threshold are "
    "healthy; pool is prefill for prefill workers, otherwise serve.",
    ("model", "pool"),
)
PANICS = counter(
    "proxy_pool_panics",
    "Times that the router began to ignore the breakers of a model's workers.",
    ("model", "pool"),
)
DRAINING = worker_gauge("draining", "1 while the worker is drained and gets no new requests.")

process = ProcessCollector(registry=None)


async def write_page(metrics: Metrics, openmetrics: bool = False) -> tuple[bytes, str]:
    """Return the page and its content type.

    The event loop serves streams between the slices of the page.
    """
    page, pieces = MetricsPage(openmetrics=openmetrics), []
    for piece in slices(metrics, page):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces), page.kind


def slices(metrics: Metrics, page: MetricsPage) -> Iterator[bytes]:
    """Yield pieces of the page; counters may change between two pieces."""
    _name_models(metrics)
    page.values(BUILD, [((VERSION,), 1)])
    for _ in _requests(page, metrics):
        yield b""
    _counts(page, metrics)
    _histograms(page, metrics)
    _handovers(page, metrics)
    yield b""
    _workers(page, list(metrics.router.fleet.roster))
    _panics(page, metrics)
    yield b""
    _router(page, metrics)
    metrics.tenants.show(page)
    metrics.targets.show(page)
    _process(page)
    yield b""
    yield from page.slices()


def _name_models(metrics: Metrics) -> None:
    # First of all, because making room for new models may drop the counters of others.
    for model in {model for model, _ in metrics.router.placer.decisions}:
        metrics.model_label(model)


def _requests(page: MetricsPage, metrics: Metrics) -> Iterator[None]:
    requests: Counter[tuple[str, ...]] = Counter()
    for number, (key, series) in enumerate([*metrics.requests.items()]):
        route, model, worker, _, reason, status, size = key
        requests[route, model, worker, reason, str(status), size] += series.count
        if number % SLICE_LINES == SLICE_LINES - 1:
            yield
    page.values(REQUESTS, requests.items())


def _counts(page: MetricsPage, metrics: Metrics) -> None:
    page.values(RETRIES, metrics.retries.items())
    _continuations(page, metrics)
    decisions: Counter[tuple[str, str]] = Counter()
    for (model, reason), count in metrics.router.placer.decisions.items():
        decisions[metrics.model_label(model), reason.value] += count
    page.values(DECISIONS, decisions.items())
    session_counts.show(page, metrics)


def _continuations(page: MetricsPage, metrics: Metrics) -> None:
    continued, lost = metrics.continuations, metrics.lost_streams
    if journals := list(metrics.journals()):  # from zero, so that the first one is an increase
        continued = Counter(
            {**dict.fromkeys((journal.worker for journal in journals), 0), **continued}
        )
        lost = Counter({**dict.fromkeys(REASONS, 0), **lost})
    page.values(CONTINUED, (((worker,), count) for worker, count in continued.items()))
    page.values(NOT_CONTINUED, (((why,), count) for why, count in lost.items()))


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
    metrics.no_first_token.show(page)


def _handovers(page: MetricsPage, metrics: Metrics) -> None:
    counters, roster = metrics.handovers, metrics.router.fleet.roster
    decisions: Counter[tuple[str, str]] = Counter()
    for (model, why), count in metrics.router.placer.handovers.items():
        decisions[metrics.model_label(model), why] += count
    page.values(HANDOVER_DECISIONS, decisions.items())
    page.values(HANDOVERS, (((outcome,), count) for outcome, count in counters.ends.items()))
    page.values(WARMUPS, (((outcome,), count) for outcome, count in counters.warmups.items()))
    counters.forget({worker.name for worker in roster})
    page.values(BARS, counters.bars.items())
    page.values(PREFILL_LEGS, (((worker,), count) for worker, count in counters.legs.items()))
    page.values(TRANSFER_TOKENS, (((model,), count) for model, count in counters.tokens.items()))
    reported = [
        (w, w.gauges.extra["kv_bytes"]) for w in roster if w.gauges and "kv_bytes" in w.gauges.extra
    ]
    page.values(TRANSFER_BYTES, (((w.name, w.role.value), count) for w, count in reported))
    for family, table in (
        (PREFILL_LEG, counters.prefills),
        (TRANSFER, counters.transfers),
        (PREDICTED_TRANSFER, counters.predicted),
    ):
        page.histograms(family, (((model,), seen) for model, seen in table.items()))


def _workers(page: MetricsPage, workers: list[Worker]) -> None:
    rows = [((worker.name, worker.role.value, worker.model), worker) for worker in workers]
    charges = [(labels, own_load(worker)) for labels, worker in rows]
    page.values(INFLIGHT, ((labels, load.requests) for labels, load in charges))
    page.values(PREFILL, ((labels, load.prefill_tokens) for labels, load in charges))
    page.values(DECODE, ((labels, load.decode_tokens) for labels, load in charges))
    page.values(KV, ((labels, load.kv_tokens) for labels, load in charges))
    page.values(PINNED, ((labels, load.unfetched_handovers) for labels, load in charges))
    page.values(KV_USAGE, ((labels, w.gauges.kv_usage) for labels, w in rows if w.gauges))
    now = time.monotonic()
    page.values(SLOTS, ((labels, share_taken(w, now)) for labels, w in rows if w.gauges))
    page.values(KV_CAPACITY, ((labels, w.kv_capacity) for labels, w in rows if w.kv_capacity))
    page.values(UP, ((labels, w.up and not w.lacks_model) for labels, w in rows))
    page.values(BREAKER, ((labels, w.is_barred) for labels, w in rows))
    kept_out = [(labels, w.breaker) for labels, w in rows if not w.breaker.closed]
    page.values(BREAKER_STATE, (((*labels, _state(b, now)), 1) for labels, b in kept_out))
    opened = ((labels, why, n) for labels, w in rows for why, n in w.breaker.opened.items())
    page.values(OPENINGS, (((*labels, why), n) for labels, why, n in opened))
    page.values(DRAINING, ((labels, w.draining) for labels, w in rows))


def _panics(page: MetricsPage, metrics: Metrics) -> None:
    roster = metrics.router.fleet.roster
    ejections = roster.ejections
    pools = {
        (model, is_prefill): (model, "prefill" if is_prefill else "serve")
        for model, is_prefill in map(pool_key_of, roster)
    }
    page.values(PANIC, ((labels, key in ejections.panics) for key, labels in pools.items()))
    started = ejections.started
    page.values(PANICS, ((labels, started.get(key, 0)) for key, labels in pools.items()))


def _state(breaker: Breaker, now: float) -> str:
    # Also in half_open: with few requests a busy worker's breaker is mostly half_open.
    return BUSY if breaker.busy else breaker.state(now).value


def _router(page: MetricsPage, metrics: Metrics) -> None:
    queue = metrics.router.queue
    page.values(PROCESSES, [((), 1)])
    # A single process is restarted from outside, for example by systemd.
    page.values(RESTARTS, [((), 0)])
    for family, value in replica_counts.ALONE.rows():
        page.values(family, [((), value)])
    page.values(replica_counts.LIMITS_UP, [((), metrics.limits_shared())])
    page.values(QUEUE_REQUESTS, [((), len(queue))])
    page.values(QUEUE_LIMIT, [((), queue.max_requests)])
    page.values(QUEUE_BYTES, [((), queue.bytes)])
    page.values(CLIENTS, [((), metrics.client_connections)])
    page.values(NO_ROOM, [((), metrics.connects_failed)])
    page.values(LOG_DROPPED, [((), metrics.log_lines_dropped())])
    connections = metrics.upstream_connections()
    page.values(UPSTREAM, (((worker, state), count) for worker, state, count in connections))
    sources = list(metrics.discovered())
    page.values(DISCOVERY_UP, (((name,), works) for name, works, _ in sources))
    page.values(DISCOVERED, (((name,), count) for name, _, count in sources))
    journal_counts.show(page, metrics.journals())
    if metrics.batches is not None:
        metrics.batches.show(page)
    page.values(BYTES_PER_TOKEN, _bytes_per_token(metrics))


def _bytes_per_token(metrics: Metrics) -> Iterator[tuple[tuple[str, str], float]]:
    for route, model in dict.fromkeys((route, model) for route, model, *_ in metrics.requests):
        per_token = metrics.router.sizer.prior(model, route).bytes_per_token
        if per_token is not None:
            yield (model, route), round(per_token, 3)


def _process(page: MetricsPage) -> None:
    for family in process.collect():
        kind: Literal["counter", "gauge"] = "counter" if family.type == "counter" else "gauge"
        rows = [((), sample.value) for sample in family.samples]
        page.values(Family(family.name, kind, family.documentation), rows)
