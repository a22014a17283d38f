"""The router's current state as the status page shows it, updated once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from operator import add, itemgetter
from typing import Any

from proxy.core.fleet.worker import Worker
from proxy.core.tenants.tenants import Tenant
from proxy.health.worker_state import state, why_not
from proxy.metrics.histogram import GAP_BOUNDS, TTFT_BOUNDS, Histogram
from proxy.metrics.page import VERSION
from proxy.metrics.registry import Metrics
from proxy.status_page.window import COPY_INTERVAL_S, Window, quantile

MAX_WORKERS = 500
MAX_TENANTS = 100
MAX_LATENCY_ROWS = 12  # latency rows per kind
QUANTILES = (0.5, 0.99)
ANY = "all"
HEALTHY_STATES = ("up", "draining", "drained")  # or stopped by an operator
TTFT, TPOT, ITL = KINDS = "TTFT", "TPOT", "ITL"
TOKENS, LIMITED = TENANT_COUNTERS = "tokens", "limited"
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveCounts:
    covers_s: float | None  # seconds of the last minute that the window covers
    counts: dict[Key, tuple[int, int]]  # since the start, and in the last minute
    histograms: dict[Key, list[int]]  # counts of the last minute by kind, pool, model and class
    clients: int
    queue: tuple[int, int]  # requests and bytes
    tenants: dict[str, tuple[int, int]]  # requests in flight and, of these, queued


class LiveState:
    """The counters, and their growth in the last minute."""

    def __init__(self, metrics: Metrics, draining: Callable[[], bool] = lambda: False) -> None:
        self._metrics = metrics
        self._draining = draining
        self._window = Window()

    async def run(self, clock: Callable[[], float]) -> None:
        """Take a copy of the counters every few seconds."""
        while True:
            self.copy(clock())
            await asyncio.sleep(COPY_INTERVAL_S)

    def copy(self, now: float) -> None:
        self._window.copy(now, dict(self._counts()), dict(self._histograms()))

    def figures(self, now: float) -> LiveCounts:
        since, queue = self._window.since, self._metrics.router.queue
        return LiveCounts(
            None if since is None else min(now - since, 60.0),
            {key: (count, self._window.count(key, count)) for key, count in self._counts()},
            {key: self._window.of(key, histogram) for key, histogram in self._histograms()},
            self._metrics.client_connections,
            (len(queue), queue.bytes),
            {
                tenant.name: (tenant.ledger.running, tenant.waiting)
                for tenant in islice(self._metrics.router.tenants, MAX_TENANTS)
            },
        )

    def as_json(self, now: float, counted: Sequence[LiveCounts] = ()) -> dict[str, Any]:
        """Return the state with the counts of these processes, by default of this one."""
        counted = counted or [self.figures(now)]
        covers = [counts.covers_s for counts in counted if counts.covers_s is not None]
        router = self._metrics.router
        roster = router.fleet.roster
        workers = sorted(roster, key=is_healthy)[:MAX_WORKERS]  # unhealthy workers first
        tenants = list(islice(router.tenants, MAX_TENANTS))
        rows = list(latencies(counted))
        shown = busiest(rows)
        requests, queued_bytes = _sums(counts.queue for counts in counted)
        return {
            "version": VERSION,
            "policy": router.settings.policy,
            "draining": self._draining(),
            "covers_s": round(min(covers), 1) if covers else None,
            "clients": sum(counts.clients for counts in counted),
            "queue": {
                "requests": requests,
                "limit": router.queue.max_requests,
                "bytes": queued_bytes,
            },
            "workers": [_worker(worker, now) for worker in workers],
            "pools": _pools(roster),
            "more_workers": max(len(roster) - MAX_WORKERS, 0),
            "answered": grown(counted, "answered")[0][1:],
            "decisions": grown(counted, "decision"),
            "handovers": grown(counted, "handover"),
            "turns": grown(counted, "turn"),
            "sessions": len(roster.sessions),
            "retries": grown(counted, "retry"),
            "tenants": [self._tenant(tenant, counted) for tenant in tenants],
            "latencies": shown,
            "more_latencies": len(rows) - len(shown),
        }

    def _tenant(self, tenant: Tenant, counted: Sequence[LiveCounts]) -> dict[str, Any]:
        name = tenant.name
        requests, waiting = _sums(counts.tenants.get(name, (0, 0)) for counts in counted)
        shown: dict[str, Any] = {
            "name": name,
            "class": tenant.spec.rank.name.lower(),
            "requests": requests,
            "waiting": waiting,
        }
        for kind in TENANT_COUNTERS:
            shown[kind] = _sums(counts.counts.get((kind, name), (0, 0)) for counts in counted)
        return shown

    def _counts(self) -> Iterator[tuple[Key, int]]:
        metrics = self._metrics
        for outcome, count in metrics.handovers.ends.items():
            yield ("handover", outcome), count
        tables: tuple[tuple[str, Mapping[tuple[str, Any], int]], ...] = (
            ("decision", metrics.router.placer.decisions),
            ("turn", metrics.router.fleet.roster.sessions.turns),
            ("retry", metrics.retries),
        )
        for kind, table in tables:
            total: Counter[str] = Counter()
            for (_, name), count in table.items():
                total[name] += count
            for name, count in total.items():
                yield (kind, name), count
        yield ("answered", ""), sum(counter.count for counter in metrics.requests.values())
        for tenant in islice(metrics.router.tenants, MAX_TENANTS):
            totals = tenant.totals
            yield (TOKENS, tenant.name), totals.prompt_tokens + totals.output_tokens
            yield (LIMITED, tenant.name), sum(totals.limited.values())

    def _histograms(self) -> Iterator[tuple[Key, Histogram]]:
        metrics = self._metrics
        for kind, table in ((TTFT, metrics.ttft), (TPOT, metrics.tpot)):
            for key, histogram in table.items():
                yield (kind, *key), histogram
        for (pool, size), histogram in metrics.gaps.items():
            yield (ITL, str(pool), ANY, size), histogram


def _sums(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return [*map(sum, zip(*pairs, strict=True))]


def grown(counted: Sequence[LiveCounts], kind: str) -> list[tuple[str, int, int]]:
    """Return (name, count since the start, count in the last minute), largest first."""
    total: Counter[str] = Counter()
    minute: Counter[str] = Counter()
    for counts in counted:
        for (of, name, *_), (count, lately) in counts.counts.items():
            if of == kind:
                total[name] += count
                minute[name] += lately
    rows = [(name, count, minute[name]) for name, count in total.items()]
    return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))


def latencies(counted: Sequence[LiveCounts]) -> Iterator[dict[str, Any]]:
    latencies: dict[Key, list[int]] = {}
    for part in counted:
        for key, counts in part.histograms.items():
            before = latencies.get(key)
            latencies[key] = counts if before is None else [*map(add, before, counts)]
    for key, counts in sorted(latencies.items(), key=lambda item: KINDS.index(item[0][0])):
        if any(counts):
            kind, pool, model, size = key
            bounds = TTFT_BOUNDS if kind == TTFT else GAP_BOUNDS
            p50, p99 = (quantile(share, counts, bounds) for share in QUANTILES)
            yield {
                "what": kind, "pool": pool, "model": model, "size": size,
                "count": sum(counts), "p50_s": p50, "p99_s": p99,
            }  # fmt: skip


def busiest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each kind's rows with the most requests, in their original order."""
    shown: list[dict[str, Any]] = []
    for kind in KINDS:
        of_kind = [row for row in rows if row["what"] == kind]
        busiest_rows = nlargest(MAX_LATENCY_ROWS, of_kind, key=itemgetter("count"))
        shown += [row for row in of_kind if row in busiest_rows]
    return shown


def is_healthy(worker: Worker) -> bool:
    return state(worker) in HEALTHY_STATES


def _pools(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    pools: dict[str, Counter[str]] = {}
    for worker in workers:
        totals = pools.setdefault(worker.role.value, Counter(workers=0, up=0, requests=0))
        totals["workers"] += 1
        totals["up"] += state(worker) == "up"
        totals["requests"] += worker.requests
    return [{"role": role, **pools[role]} for role in sorted(pools)]


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    gauges = worker.gauges
    return {
        "name": worker.name,
        "role": worker.role.value,
        "model": worker.model,
        "state": state(worker),
        "well": is_healthy(worker),
        "why": why_not(worker, now),
        "breaker": worker.breaker.state(now).value,
        "requests": worker.requests,
        "most": worker.max_requests,
        "prefill_tokens": worker.prefill_tokens,
        "decode_tokens": worker.decode_tokens,
        "wait_s": round(worker.wait_s(now, for_long=True), 3),
        "running": None if gauges is None else gauges.running,
        "waiting": None if gauges is None else gauges.waiting,
        "kv_usage": None if gauges is None else round(gauges.kv_usage, 4),
    }
